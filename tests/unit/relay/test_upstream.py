import pytest

from muster.relay.upstream import HOLD, hold_within


@pytest.mark.parametrize(
    ("session_ttl_ms", "seconds"),
    [
        pytest.param(10_000, HOLD, id="the default"),
        pytest.param(60_000, HOLD, id="a long one"),
        pytest.param(3_000, 1.0, id="a short one"),
    ],
)
def test_nobody_is_kept_waiting_for_longer_than_a_third_of_the_session_ttl(
    session_ttl_ms: int, seconds: float
):
    assert hold_within(session_ttl_ms) == seconds


@pytest.mark.parametrize(
    ("session_ttl_ms", "lease_ttl_ms", "seconds"),
    [
        pytest.param(10_000, 5_000, 6.5, id="the defaults"),
        pytest.param(6_000, 5_000, 4.0, id="a short session TTL"),
    ],
)
def test_among_several_they_are_kept_until_another_may_lead(
    session_ttl_ms: int, lease_ttl_ms: int, seconds: float
):
    assert hold_within(session_ttl_ms, lease_ttl_ms) == seconds
