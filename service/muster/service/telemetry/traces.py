"""Spans of what the coordinator decides, for OpenTelemetry."""

import secrets
from collections.abc import Callable
from typing import Protocol

from muster.client.spans import Attribute, Span
from muster.client.trace_ids import TRACE_BYTES, barrier_trace, round_trace, span_id
from muster.service.core.vocabulary.effects import Notice
from muster.service.core.vocabulary.model import Decision, Outcome
from muster.service.core.vocabulary.records import RoundRecord
from muster.service.telemetry.trace_budget import TraceBudget


class Spans(Protocol):
    """Takes finished spans."""

    def add(self, span: Span) -> None:
        """Take a span, without waiting."""
        ...


class Traces:
    """Makes one span for each traced barrier and every rendezvous round, however many ranks there are.

    Args:
        spans: takes them.
        now: returns the time, in seconds since 1970.
    """

    def __init__(self, spans: Spans, now: Callable[[], float]) -> None:
        self._spans = spans
        self._now = now
        self._budget = TraceBudget()
        self._committed_at: float | None = None

    def decided(self, decision: Decision) -> None:
        """Make the span of a barrier: from its first arrival until its decision is durable and sent."""
        if not self._budget.admits(decision):
            return
        trace = barrier_trace(decision.run_id, decision.prefix, decision.sequence)
        start = decision.decided_at - decision.wait
        attributes: dict[str, Attribute] = {
            "muster.run": decision.run_id,
            "muster.prefix": decision.prefix,
            "muster.sequence": decision.sequence,
            "muster.generation": decision.generation,
            "muster.outcome": decision.outcome.name,
            "muster.arrived": decision.arrived,
            "muster.required": decision.required,
        }
        # The wall clock may have been set back since.
        end = max(self._now(), decision.decided_at)
        events = [("decided", decision.decided_at)]
        if self._committed_at is not None:
            events.append(("committed", min(max(self._committed_at, decision.decided_at), end)))
        if decision.last_arrival_rank is not None:
            attributes["muster.last_arrival_rank"] = decision.last_arrival_rank
            events.insert(0, ("last arrival", start + decision.skew))
        self._spans.add(
            Span(
                trace=trace,
                span=span_id(trace, "barrier"),
                parent=None,
                name="barrier",
                start=start,
                end=end,
                attributes=attributes,
                events=tuple(events),
                failure="" if decision.outcome is Outcome.RELEASED else decision.message,
            )
        )

    def round_completed(self, record: RoundRecord) -> None:
        """Make the span of a rendezvous round: from its first join to its completion."""
        trace = round_trace(record.run_id, record.round)
        self._spans.add(
            Span(
                trace=trace,
                span=span_id(trace, "round"),
                parent=None,
                name="rendezvous round",
                start=record.completed_at - record.join_seconds,
                end=record.completed_at,
                attributes={
                    "muster.run": record.run_id,
                    "muster.round": record.round,
                    "muster.nodes": record.world_size,
                },
            )
        )

    def serving(self, epoch: int, began: float, state_read: float) -> None:
        """Make the span of the start of a coordinator, such as after a failover. It serves from now on.

        Args:
            epoch: how often a coordinator has opened the state.
            began: when this one began, in seconds since 1970.
            state_read: when it had read the state.
        """
        now = self._now()
        trace = secrets.randbits(8 * TRACE_BYTES) or 1  # Nobody else has spans in it.
        self._spans.add(
            Span(
                trace=trace,
                span=span_id(trace, "start"),
                parent=None,
                name="start",
                start=began,
                end=max(now, began),
                attributes={"muster.epoch": epoch},
                events=(("state read", state_read), ("ports bound", now)),
            )
        )

    def noticed(self, notice: Notice) -> None:
        """Make no span: notices are logged."""

    def forgotten(self, run_id: str) -> None:
        """Make no span."""

    def committed(self, seconds: float) -> None:
        """Note the time: the decisions that follow are durable from now on.

        The driver calls this directly before it reports the decisions of a commit.
        """
        self._committed_at = self._now()
