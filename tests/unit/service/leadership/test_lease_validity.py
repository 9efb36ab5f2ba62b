"""A lease is trusted for no longer than it certainly lasts."""

from hypothesis import given
from hypothesis import strategies as st

from muster.service.leadership.lease_validity import DRIFT, LeaseValidity, boottime


class Hands:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def test_lease_lasts_from_when_its_renewal_was_sent():
    clock = Hands()
    validity = LeaseValidity(clock)
    assert validity.remaining < 0
    sent = validity.now()
    clock.time += 4.0  # The answer takes its time.
    validity.renewed(sent, 5.0)
    clock.time = sent + 5.0 * (1 - DRIFT) - 0.01
    assert validity.remaining > 0
    clock.time = sent + 5.0 * (1 - DRIFT)
    assert validity.remaining == 0
    assert not validity.certain


def test_late_answer_does_not_renew_the_lease():
    clock = Hands()
    validity = LeaseValidity(clock)
    sent = validity.now()
    clock.time += 6.0
    validity.renewed(sent, 5.0)
    assert not validity.certain


def test_ended_lease_is_never_certain_again():
    clock = Hands()
    validity = LeaseValidity(clock)
    validity.renewed(validity.now(), 5.0)
    validity.end()
    assert validity.remaining < 0
    validity.renewed(validity.now(), 5.0)  # It was under way.
    assert not validity.certain


def test_age_counts_from_the_last_renewal():
    clock = Hands()
    validity = LeaseValidity(clock)
    clock.time += 1.0
    validity.renewed(validity.now(), 5.0)
    clock.time += 1.5
    assert validity.age == 1.5


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.floats(0, 10), st.integers(1, 60)),
        max_size=8,
    )
)
def test_lease_never_outlasts_the_ttl_that_etcd_granted(renewals: list[tuple[float, float, int]]):
    """Etcd counts from when it gets a renewal: at the earliest when that was sent."""
    clock = Hands()
    validity = LeaseValidity(clock)
    ends = float("-inf")
    for pause, answer, ttl in renewals:
        clock.time += pause
        sent = validity.now()
        clock.time += answer
        validity.renewed(sent, ttl)
        ends = max(ends, sent + ttl)
        assert clock.time + validity.remaining < ends
        assert validity.certain == (validity.remaining > 0)


def test_boottime_does_not_go_back():
    assert boottime() <= boottime()
