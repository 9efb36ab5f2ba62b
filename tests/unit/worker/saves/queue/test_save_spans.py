"""The spans of one rank's part of a save: which there are, and when."""

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from muster.client.spans import Span
from muster.client.trace_ids import barrier_trace, span_id
from muster.worker.decision import Decision, Outcome
from muster.worker.saves.queue.calls import Call
from muster.worker.saves.queue.save_spans import Rank, SaveSpans
from muster.worker.saves.request import AsyncRequest

WALL = 1_790_000_000.0
COMMITTED = Decision("muster/saves/commit", 4, Outcome.RELEASED, "released")
FAILED = Decision("muster/saves", 4, Outcome.ABORTED, "was aborted")


class FakeWrite:
    preload_seconds = 1.0
    start_seconds = 0.5


def saved(
    decision: Decision = COMMITTED,
    *,
    write: bool = True,
    written_at: float | None = 109.0,
    planned: float = 0.0,
) -> Call:
    request = AsyncRequest(None, (), [], is_frozen=True)
    return Call(
        None,
        request,
        "step 7",
        prepared=2.0,
        planned=planned,
        began_at=100.0,
        write=cast(Any, FakeWrite()) if write else None,
        seconds=4.0,
        voted_at=106.0,
        written_at=written_at,
        decided_at=110.0,
        decision=decision,
    )


def spans_of(rank: int = 3, decision: Decision = COMMITTED) -> SaveSpans:
    return SaveSpans(Rank("job1", 2, rank, f"node-{rank}"), decision, "step 7", WALL)


def times(spans: list[Span]) -> dict[str, tuple[float, float]]:
    return {one.name: (one.start - WALL, one.end - WALL) for one in spans}


def test_committed_save_has_a_span_for_each_phase():
    assert times([*spans_of().decided(saved()), spans_of().finalized(111.0, 112.0)]) == {
        "save": (98.0, 110.0),
        "stage": (98.0, 101.0),
        "fork": (101.0, 101.5),
        "write": (101.5, 105.5),
        "vote": (106.0, 109.0),
        "commit": (109.0, 110.0),
        "finalize": (111.0, 112.0),
    }


def test_plan_has_a_span_after_the_copy():
    found = times(list(spans_of().decided(saved(planned=0.5))))
    assert (found["stage"], found["plan"]) == ((98.0, 99.5), (99.5, 101.0))


def test_save_that_failed_has_no_commit_and_says_why():
    spans = list(spans_of(decision=FAILED).decided(saved(FAILED, write=False, written_at=None)))
    assert list(times(spans)) == ["save", "stage", "vote"]
    assert spans[0].failure == "was aborted"


def test_spans_of_a_rank_hang_below_the_coordinators_barrier():
    trace = barrier_trace("job1", "muster/saves/commit", 4)
    save, *phases = spans_of().decided(saved())
    assert save.parent == span_id(trace, "barrier")
    assert {one.parent for one in phases} == {save.span}
    assert {one.trace for one in (save, *phases)} == {trace}
    assert save.attributes["muster.rank"] == 3
    assert save.attributes["host.name"] == "node-3"


@given(st.sets(st.integers(0, 65_535), min_size=2, max_size=8))
def test_ranks_share_a_trace_and_no_span(ranks: set[int]):
    made = [one for rank in ranks for one in spans_of(rank).decided(saved())]
    assert len({one.trace for one in made}) == 1
    assert len({one.span for one in made}) == len(made)
