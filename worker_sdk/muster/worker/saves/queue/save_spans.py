"""The spans of one rank's part of a save.

They are made when the save is decided, and not before: only then is the sequence of the barrier that decides
it known, from which their trace derives.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from muster.client.spans import Attribute, Span
from muster.client.trace_ids import barrier_trace, span_id
from muster.worker.decision import Decision
from muster.worker.saves.queue.calls import Call


@dataclass(frozen=True, slots=True)
class Rank:
    """The rank that saves."""

    run_id: str
    generation: int
    rank: int
    host: str


class SaveSpans:
    """Makes the spans of a save that was decided.

    Args:
        rank: the rank that saved.
        decision: of the barrier that decided the save.
        name: the save's name, for people.
        wall: seconds since 1970 when the monotonic clock showed 0.
    """

    def __init__(self, rank: Rank, decision: Decision, name: str, wall: float) -> None:
        self._trace = barrier_trace(rank.run_id, decision.prefix, decision.sequence)
        self._id = span_id(self._trace, "save", rank.generation, rank.rank)
        self._rank = rank
        self._decision = decision
        self._wall = wall
        self._attributes: dict[str, Attribute] = {
            "muster.run": rank.run_id,
            "muster.prefix": decision.prefix,
            "muster.sequence": decision.sequence,
            "muster.generation": rank.generation,
            "muster.rank": rank.rank,
            "host.name": rank.host,
            "muster.save": name,
        }

    def decided(self, call: Call) -> Iterator[Span]:
        """Yield the spans of a save until its decision. Phases that it did not have are left out.

        Args:
            call: the save, on the monotonic clock.
        """
        decided = call.decided_at or call.began_at
        preload, fork = call.preload_and_start
        start = call.began_at - call.prepared
        planned = call.began_at - call.planned
        staged = call.began_at + preload
        forked = staged + fork
        voted = decided if call.voted_at is None else call.voted_at
        written = decided if call.written_at is None else call.written_at
        failure = "" if self._decision.released else self._decision.message
        yield self._span("save", self._id, span_id(self._trace, "barrier"), start, decided, failure)
        phases = [("stage", start, staged)]
        if call.planned:
            phases = [("stage", start, planned), ("plan", planned, staged)]
        if call.write is not None:
            phases += [("fork", staged, forked), ("write", forked, forked + call.seconds)]
        phases.append(("vote", voted, written))
        if call.written_at is not None:
            phases.append(("commit", written, decided))
        for name, began, ended in phases:
            yield self._phase(name, began, ended)

    def finalized(self, began: float, ended: float) -> Span:
        """Return the span of the finalize functions, between two times of the monotonic clock."""
        return self._phase("finalize", began, ended)

    def _phase(self, name: str, start: float, end: float) -> Span:
        own = span_id(self._trace, name, self._rank.generation, self._rank.rank)
        return self._span(name, own, self._id, start, end)

    def _span(self, name: str, own: int, parent: int, start: float, end: float, failure: str = "") -> Span:
        return Span(
            trace=self._trace,
            span=own,
            parent=parent,
            name=name,
            start=self._wall + start,
            end=self._wall + max(start, end),
            attributes=self._attributes,
            failure=failure,
        )
