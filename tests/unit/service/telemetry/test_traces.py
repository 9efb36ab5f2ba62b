"""The spans of barriers and rounds, without an exporter."""

import re
from dataclasses import replace

import pytest
from prometheus_client.openmetrics.exposition import generate_latest

from lab import records
from muster.client.spans import Span
from muster.client.trace_ids import barrier_trace, round_trace, trace_text
from muster.service.core.vocabulary.model import Decision, Outcome
from muster.service.core.vocabulary.records import RoundRecord
from muster.service.telemetry.metrics import Metrics
from muster.service.telemetry.trace_budget import MAX_RELEASED_PER_GROUP, MAX_RELEASED_PER_SECOND, TraceBudget
from muster.service.telemetry.traces import Traces


class KeptSpans:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, span: Span) -> None:
        self.spans.append(span)


@pytest.fixture
def spans() -> KeptSpans:
    return KeptSpans()


def made(spans: KeptSpans, decision: Decision, delivered_after: float = 0.5) -> Span:
    Traces(spans, lambda: decision.decided_at + delivered_after).decided(decision)
    (span,) = spans.spans
    return span


def test_barrier_is_one_span_from_first_arrival_to_delivery(spans: KeptSpans):
    decision = records.decision(outcome=Outcome.RELEASED, wait=4.0, skew=3.0, last_arrival_rank=5)
    span = made(spans, decision)
    first = decision.decided_at - 4.0
    assert span.trace == barrier_trace("job1", "checkpoint", 7)
    assert (span.start, span.end) == (first, decision.decided_at + 0.5)
    assert span.events == (("last arrival", first + 3.0), ("decided", decision.decided_at))
    assert span.attributes["muster.last_arrival_rank"] == 5
    assert span.failure == ""


def test_barrier_that_failed_has_the_decisions_sentence(spans: KeptSpans):
    decision = records.decision()
    assert made(spans, decision).failure == decision.message


def test_span_does_not_end_before_it_starts_when_the_clock_is_set_back(spans: KeptSpans):
    decision = records.decision(wait=1.0)
    assert made(spans, decision, delivered_after=-3600).end == decision.decided_at


@pytest.mark.parametrize(
    ("commit", "delivery", "shown"),
    [
        (0.2, 0.5, 0.2),
        # The wall clock was set back before the commit, after it, or before it and forward again.
        (-3600.0, -3599.0, 0.0),
        (0.2, -3600.0, 0.0),
        (-3600.0, 0.5, 0.0),
        # It was set forward before the commit, and back after it.
        (3600.0, 0.5, 0.5),
    ],
)
def test_commit_is_between_decision_and_end_of_the_span(
    spans: KeptSpans, commit: float, delivery: float, shown: float
):
    decision = records.decision(outcome=Outcome.RELEASED, wait=4.0, last_arrival_rank=None)
    times = iter([decision.decided_at + commit, decision.decided_at + delivery])
    traces = Traces(spans, lambda: next(times))
    traces.committed(0.1)
    traces.decided(decision)
    (span,) = spans.spans
    assert span.events == (
        ("decided", decision.decided_at),
        ("committed", decision.decided_at + shown),
    )
    assert span.end >= span.events[1][1]


def test_round_is_one_span_from_first_join_to_completion(spans: KeptSpans):
    Traces(spans, lambda: 0.0).round_completed(RoundRecord("job1", 3, 8, 1000.0, 2.5))
    (span,) = spans.spans
    assert span.trace == round_trace("job1", 3)
    assert (span.start, span.end) == (997.5, 1000.0)
    assert span.attributes["muster.nodes"] == 8


def test_start_is_one_span_until_the_coordinator_serves(spans: KeptSpans):
    traces = Traces(spans, lambda: 1004.0)
    traces.serving(epoch=7, began=1000.0, state_read=1003.0)
    traces.serving(epoch=8, began=1000.0, state_read=1003.0)
    span, other = spans.spans
    assert (span.start, span.end, span.attributes) == (1000.0, 1004.0, {"muster.epoch": 7})
    assert span.events == (("state read", 1003.0), ("ports bound", 1004.0))
    assert span.trace != other.trace


def test_released_barriers_beyond_the_budget_of_a_second_are_not_traced(spans: KeptSpans, metrics: Metrics):
    traces = Traces(spans, lambda: 0.0)
    metrics.link_traces()
    for at in (1000.0, 1000.9, 1001.0):
        for number in range(MAX_RELEASED_PER_SECOND):
            decision = records.decision(outcome=Outcome.RELEASED)
            one = replace(decision, run_id=f"job{number}", decided_at=at)
            traces.decided(one)
            metrics.decided(one)
    assert len(spans.spans) == 2 * MAX_RELEASED_PER_SECOND
    failed = [replace(records.decision(), decided_at=1000.0, sequence=number) for number in range(100)]
    for one in failed:
        traces.decided(one)
    assert len(spans.spans) == 2 * MAX_RELEASED_PER_SECOND + 100


def test_flood_of_one_group_does_not_hide_the_barrier_of_another():
    budget = TraceBudget()
    flood = records.decision(outcome=Outcome.RELEASED)
    others = replace(flood, run_id="job2"), replace(flood, prefix="eval")
    admitted = [budget.admits(replace(flood, sequence=number)) for number in range(1000)]
    assert admitted == [True] * MAX_RELEASED_PER_GROUP + [False] * (1000 - MAX_RELEASED_PER_GROUP)
    assert [budget.admits(other) for other in others] == [True, True]
    # The next second is new to all groups.
    assert budget.admits(replace(flood, decided_at=flood.decided_at + 1))


def exemplars(metrics: Metrics) -> set[str]:
    return set(re.findall(r'# \{trace_id="([0-9a-f]{32})"\}', generate_latest(metrics.registry).decode()))


def test_histograms_name_traces_only_when_there_are_any(metrics: Metrics):
    metrics.decided(records.decision())
    assert exemplars(metrics) == set()
    metrics.link_traces()
    metrics.decided(records.decision())
    metrics.round_completed(RoundRecord("job1", 3, 8, 1000.0, 2.5))
    assert exemplars(metrics) == {
        trace_text(barrier_trace("job1", "checkpoint", 7)),
        trace_text(round_trace("job1", 3)),
    }
