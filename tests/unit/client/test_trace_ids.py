"""Ids of traces: the same on all sides, and different for different names."""

from hypothesis import given
from hypothesis import strategies as st

from muster.client.trace_ids import barrier_trace, round_trace, span_id, trace_text

NAMES = st.text(max_size=20)
SEQUENCES = st.integers(0, 2**64 - 1)
BARRIERS = st.tuples(NAMES, NAMES, SEQUENCES)


@given(BARRIERS, BARRIERS)
def test_barriers_share_a_trace_only_if_they_are_the_same(
    one: tuple[str, str, int], other: tuple[str, str, int]
):
    assert (barrier_trace(*one) == barrier_trace(*other)) == (one == other)


@given(st.text(max_size=6), st.text(max_size=6), st.integers(0, 6))
def test_text_that_moves_between_names_changes_the_trace(run: str, prefix: str, cut: int):
    joined = run + prefix
    moved = joined[:cut], joined[cut:]
    same = moved == (run, prefix)
    assert (barrier_trace(*moved, 0) == barrier_trace(run, prefix, 0)) == same


@given(BARRIERS, st.lists(NAMES | st.integers(0, 4096), max_size=3))
def test_ids_fit_their_fields_and_are_never_zero(barrier: tuple[str, str, int], names: list[str | int]):
    trace = barrier_trace(*barrier)
    assert 0 < trace < 2**128
    assert 0 < span_id(trace, *names) < 2**64
    assert int(trace_text(trace), 16) == trace
    assert len(trace_text(trace)) == 32


@given(NAMES, SEQUENCES)
def test_round_has_another_trace_than_a_barrier(run: str, number: int):
    assert round_trace(run, number) != barrier_trace(run, "", number)


def test_ids_are_the_same_in_all_versions():
    """An SDK and a coordinator of different versions must derive the same ids."""
    trace = barrier_trace("job1", "checkpoint", 6)
    assert trace_text(trace) == "efb25244baac9e4471af9b93a6188fea"
    assert f"{span_id(trace, 'barrier'):016x}" == "3648a36ec83a9813"
