"""With the default settings, dead ranks are lost after the grace, and living ranks never are."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.patience import until
from lab.processes.coordinator import Coordinator
from lab.processes.proxy import Proxy
from tests.support.ranks import assert_good_history, everyone, ranks
from tests.support.waiters import wait_for_arrivals

TTL, GRACE = 10.0, 3.0
REFUSALS = 3
"""Attempts that a rank makes within the first second."""


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    with Coordinator(tmp_path, session_ttl=TTL, reset_grace=GRACE) as running:
        yield running


def test_killed_rank_is_lost_after_the_grace(coordinator: Coordinator):
    with ranks(coordinator.endpoint, 2) as world:
        everyone(world)
        world[1].kill()
        lost = world[0].ask("barrier")
        assert (lost.outcome, lost.missing_ranks) == ("MEMBER_LOST", [1])
        assert GRACE <= lost.missing[0].last_seen < TTL


def test_stopped_rank_is_lost_when_the_session_ttl_is_over(tmp_path: Path):
    with (
        Coordinator(tmp_path, session_ttl=5.0, reset_grace=GRACE) as coordinator,
        ranks(coordinator.endpoint, 2) as world,
    ):
        everyone(world)
        world[1].kill(signal.SIGSTOP)
        lost = world[0].ask("barrier")
        assert (lost.outcome, lost.missing_ranks) == ("MEMBER_LOST", [1])
        assert GRACE <= lost.missing[0].last_seen < TTL
        world[1].kill(signal.SIGCONT)


def test_ranks_behind_a_proxy_that_resets_and_restarts_are_not_lost(coordinator: Coordinator):
    with Proxy(coordinator.port) as proxy, ranks(proxy.endpoint, 3) as world:
        everyone(world)
        for refusals in (0, REFUSALS * 3, 0, REFUSALS * 3):
            for rank in world[1:]:
                rank.tell("barrier")
            wait_for_arrivals(coordinator.endpoint, 2)
            before = proxy.refused
            proxy.cut(refuse=refusals > 0)
            until(lambda: proxy.refused >= before + refusals)  # noqa: B023  # It is called at once.
            proxy.heal()
            assert world[0].ask("barrier").outcome == "RELEASED"
            assert [rank.answer().outcome for rank in world[1:]] == ["RELEASED"] * 2
        assert_good_history(world)
        assert not coordinator.log("member.gone")


def test_ranks_outlive_a_coordinator_that_is_killed(coordinator: Coordinator):
    with ranks(coordinator.endpoint, 3) as world:
        everyone(world)
        for rank in world[1:]:
            rank.tell("barrier")
        wait_for_arrivals(coordinator.endpoint, 2)
        coordinator.restart()
        assert world[0].ask("barrier").outcome == "RELEASED"
        assert [rank.answer().outcome for rank in world[1:]] == ["RELEASED"] * 2
        assert not coordinator.log("member.gone")
