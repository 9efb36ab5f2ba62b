"""A lease is trusted for no longer than it certainly lasts."""

from hypothesis import given
from hypothesis import strategies as st

from muster.service.leadership.tenure import DRIFT, Tenure, seconds_awake_or_not


class Hands:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def test_it_lasts_from_when_the_renewal_was_sent_and_not_from_its_answer():
    clock = Hands()
    tenure = Tenure(clock)
    assert tenure.left < 0
    sent = tenure.now()
    clock.time += 4.0  # The answer takes its time.
    tenure.renewed(sent, 5.0)
    clock.time = sent + 5.0 * (1 - DRIFT) - 0.01
    assert tenure.left > 0
    clock.time = sent + 5.0 * (1 - DRIFT)
    assert tenure.left == 0
    assert not tenure.certain


def test_an_answer_that_comes_too_late_renews_nothing():
    clock = Hands()
    tenure = Tenure(clock)
    sent = tenure.now()
    clock.time += 6.0
    tenure.renewed(sent, 5.0)
    assert not tenure.certain


def test_once_it_is_over_it_is_not_certain():
    clock = Hands()
    tenure = Tenure(clock)
    tenure.renewed(tenure.now(), 5.0)
    tenure.over()
    assert tenure.left < 0
    tenure.renewed(tenure.now(), 5.0)  # It was under way.
    assert not tenure.certain


def test_its_age_is_that_of_the_last_renewal():
    clock = Hands()
    tenure = Tenure(clock)
    clock.time += 1.0
    tenure.renewed(tenure.now(), 5.0)
    clock.time += 1.5
    assert tenure.age == 1.5


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.floats(0, 10), st.integers(1, 60)),
        max_size=8,
    )
)
def test_it_never_outlasts_what_etcd_gave(renewals: list[tuple[float, float, int]]):
    """Etcd counts from when it gets a renewal: at the earliest when that was sent."""
    clock = Hands()
    tenure = Tenure(clock)
    ends = float("-inf")
    for pause, answer, ttl in renewals:
        clock.time += pause
        sent = tenure.now()
        clock.time += answer
        tenure.renewed(sent, ttl)
        ends = max(ends, sent + ttl)
        assert clock.time + tenure.left < ends
        assert tenure.certain == (tenure.left > 0)


def test_the_clock_goes_on():
    assert seconds_awake_or_not() <= seconds_awake_or_not()
