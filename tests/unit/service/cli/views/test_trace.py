"""The drawing of a barrier's time."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from muster.client.trace_ids import barrier_trace, trace_text
from muster.service.cli.views.trace import Phase, phases, trace_document, trace_text_of, waterfall
from muster.v1 import common_pb2
from tests.unit.service.cli import samples

RELEASED = common_pb2.OUTCOME_RELEASED
TIMES = st.integers(0, 2**40)


def test_released_barrier_is_drawn_from_its_first_arrival():
    barrier = samples.decided(outcome=RELEASED)
    barrier.decision.wait_ms, barrier.decision.skew_ms = 400, 300
    assert trace_text_of(barrier, 40) == (
        f"Trace:    {trace_text(barrier_trace('job1', 'checkpoint', 6))}\n"
        "Barrier:  job1 checkpoint #6\n"
        "State:    RELEASED\n"
        "Arrived:  16 of 16\n"
        "Decided:  2026-09-21T14:13:20Z\n"
        "Last:     rank 5\n"
        "\n"
        "ranks arrive  ███████████████      300ms\n"
        "decided                     █████  100ms"
    )


def test_barrier_that_failed_shows_its_wait_for_the_missing():
    assert phases(samples.decided(samples.missing(11))) == [
        Phase("ranks arrive", 0, 12),
        Phase("waits for the missing", 12, 300_000),
    ]


def test_open_barrier_is_drawn_so_far():
    text = trace_text_of(samples.waiting(samples.missing(3)), 80)
    assert "State:    OPEN\n" in text
    assert text.splitlines()[-1].startswith("ranks arrive, so far  ██")
    assert text.endswith("41s")


def test_barrier_without_arrivals_has_one_phase():
    barrier = samples.decided()
    barrier.decision.ClearField("last_arrival_rank")
    assert phases(barrier) == [Phase("nobody arrives", 0, 300_000)]


def test_document_has_the_trace_id_and_the_phases():
    assert trace_document(samples.decided(outcome=RELEASED)) == {
        "trace_id": trace_text(barrier_trace("job1", "checkpoint", 6)),
        "phases": [
            {"name": "ranks arrive", "start_ms": 0, "end_ms": 12},
            {"name": "decided", "start_ms": 12, "end_ms": 300_000},
        ],
    }


@given(st.lists(TIMES, min_size=2, max_size=5).map(sorted), st.integers(1, 300))
def test_bars_stay_in_their_column_and_are_never_empty(times: list[int], width: int):
    parts = [Phase("arrive", start, end) for start, end in pairwise(times)]
    bars = [line[8 : line.rindex("  ")] for line in waterfall(parts, width).splitlines()]
    assert len({len(bar) for bar in bars}) == 1
    assert all("█" in bar for bar in bars)
