"""A coordinator process that stands still counts its pause against no member and no barrier."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lab.patience import until
from lab.processes.coordinator import Coordinator
from lab.processes.proxy import Proxy
from tests.support.members import connected
from tests.support.ranks import assert_good_history, everyone, ranks
from tests.support.waiters import wait_for_arrivals

TIMEOUT = 3.0
"""Seconds of a barrier that is over before the coordinator runs again."""


@contextmanager
def paused(coordinator: Coordinator, seconds: float) -> Iterator[None]:
    """SIGSTOP, and SIGCONT after so many seconds, in which the body runs."""
    coordinator.signal(signal.SIGSTOP)
    runs_at = time.monotonic() + seconds
    try:
        yield
        # The pause itself is what is tested.
        time.sleep(max(0.0, runs_at - time.monotonic()))
    finally:
        coordinator.signal(signal.SIGCONT)


def test_member_that_comes_back_is_not_lost_when_the_coordinator_was_paused(coordinator: Coordinator):
    with (
        Proxy(coordinator.port) as proxy,
        ranks(coordinator.endpoint, 3, 0, 2) as (zero, two),
        ranks(proxy.endpoint, 3, 1) as (one,),
    ):
        everyone([zero, one, two])
        zero.tell("barrier")
        wait_for_arrivals(coordinator.endpoint, 1)
        proxy.cut(refuse=True)
        until(lambda: connected(coordinator.endpoint) == [0, 2], "rank 1 is not missed")
        with paused(coordinator, coordinator.session_ttl + 2.0):
            proxy.heal()
            for rank in (one, two):
                rank.tell("barrier")
        assert [rank.answer().outcome for rank in (zero, one, two)] == ["RELEASED"] * 3
        assert coordinator.log("member.gone") == []
        assert_good_history([zero, one, two])


@pytest.mark.back_in_time
def test_barrier_counts_queued_arrivals_when_the_coordinator_was_paused(coordinator: Coordinator):
    with ranks(coordinator.endpoint, 2) as (zero, one):
        everyone([zero, one])
        zero.tell("barrier", timeout=TIMEOUT)
        wait_for_arrivals(coordinator.endpoint, 1)
        with paused(coordinator, TIMEOUT + 1.0):
            one.tell("barrier", timeout=TIMEOUT)
        assert [rank.answer().outcome for rank in (zero, one)] == ["RELEASED"] * 2
        assert coordinator.log("member.gone") == []
        assert_good_history([zero, one])
