"""The rate limit of copies to shared storage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.keeper.persisting.rate import BURST_SECONDS, RateLimit
from tests.support.expect import raising


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@given(
    st.integers(1, 10**10),
    st.lists(st.tuples(st.integers(0, 10**9), st.floats(0, 10)), min_size=1, max_size=30),
)
def test_no_more_is_copied_than_the_rate_allows(rate: int, copies: list[tuple[int, float]]):
    clock = Clock()
    limit = RateLimit(rate, lambda: clock.now, clock.sleep)
    total = 0
    for count, pause in copies:
        clock.now += pause
        limit.take(count)
        total += count
        assert total <= rate * (clock.now + BURST_SECONDS) * (1 + 1e-6) + 1


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=30))
def test_busy_copy_reaches_the_rate(counts: list[int]):
    clock = Clock()
    limit = RateLimit(1_000, lambda: clock.now, clock.sleep)
    for count in counts:
        limit.take(count)
    assert clock.now == pytest.approx(max(sum(counts) / 1_000 - BURST_SECONDS, 0), abs=1e-6)


def test_copy_without_a_limit_never_waits():
    limit = RateLimit(0, lambda: 0.0, raising(AssertionError, "it waits"))
    limit.take(10**12)
