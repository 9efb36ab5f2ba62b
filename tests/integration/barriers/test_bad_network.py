"""Ranks behind a proxy that drops, delays and black-holes."""

from pathlib import Path

import pytest

from lab.patience import until
from lab.processes.agents import Job
from lab.processes.coordinator import Coordinator
from lab.processes.proxy import Proxy
from tests.support.ranks import assert_good_history, everyone, ranks
from tests.support.waiters import wait_for_arrivals

CUTS = 10
APART = 5
"""Barriers between two cuts, at least."""


@pytest.mark.also_through_relay
@pytest.mark.back_in_time
def test_reconnecting_again_and_again_never_counts_twice(coordinator: Coordinator, tmp_path: Path):
    end = tmp_path / "end"
    with Proxy(coordinator.port) as proxy, ranks(proxy.endpoint, 3) as world:
        for rank in world:
            rank.tell("mixed", until=str(end), pause=0.0)
        for _ in range(CUTS):
            coordinator.logged("barrier.decided", len(coordinator.log("barrier.decided")) + APART)
            proxy.cut()
        end.touch()
        (count,) = {len(rank.answer()) for rank in world}
        assert count >= CUTS * APART
        assert_good_history(world)


@pytest.mark.also_through_relay
@pytest.mark.back_in_time
def test_a_slow_network_only_takes_longer(coordinator: Coordinator):
    with Proxy(coordinator.port) as proxy, ranks(proxy.endpoint, 2) as world:
        everyone(world)
        proxy.delay(0.3)
        assert [one.outcome for one in everyone(world)] == ["RELEASED"] * 2


def test_a_rank_in_a_black_hole_is_lost_and_comes_back_in_step(coordinator: Coordinator):
    """No packet says that it is gone: keepalive finds out, on both sides."""
    with (
        Proxy(coordinator.port) as proxy,
        ranks(coordinator.endpoint, 2, 0) as (near,),
        ranks(proxy.endpoint, 2, 1) as (far,),
    ):
        everyone([near, far])
        proxy.black_hole()
        far.tell("barrier")
        lost = near.ask("barrier")
        assert (lost.outcome, lost.missing_ranks) == ("MEMBER_LOST", [1])
        proxy.cut(refuse=True)
        proxy.heal()
        assert far.answer().outcome == "MEMBER_LOST"
        assert [one.outcome for one in everyone([near, far])] == ["RELEASED"] * 2
        assert_good_history([near, far])


@pytest.mark.also_through_relay
@pytest.mark.back_in_time
def test_a_short_cut_is_resumed_within_the_ttl(coordinator: Coordinator):
    with (
        Proxy(coordinator.port) as proxy,
        ranks(coordinator.endpoint, 2, 0) as (near,),
        ranks(proxy.endpoint, 2, 1) as (far,),
    ):
        everyone([near, far])
        far.tell("barrier")
        wait_for_arrivals(coordinator.endpoint, 1)
        proxy.cut()
        assert near.ask("barrier").outcome == "RELEASED"
        assert far.answer().outcome == "RELEASED"


def test_a_partitioned_node_is_removed_and_comes_back_as_a_newcomer(coordinator: Coordinator, tmp_path: Path):
    # Not through a relay: who is cut off from it may go on without it, as it should, before it is missed.
    with Proxy(coordinator.port) as proxy, Job(tmp_path, coordinator.endpoint) as job:

        def departed() -> list[str]:
            return [line["reason"] for line in coordinator.log("node.gone")]

        near = job.agent("1:2")
        far = job.agent("1:2", endpoint=proxy.endpoint)
        first = job.round(2)
        proxy.black_hole()
        until(lambda: any(f"(pid {far.process.pid})" in line for line in departed()))
        proxy.heal()
        proxy.cut()
        second = job.round(2, after=first[0].round)
        assert {worker.agent for worker in second} == {near.process.pid, far.process.pid}
        # It was told so, or its workers failed before that, since their peers had gone: it joined again.
        gone = [line for line in departed() if f"(pid {far.process.pid})" in line]
        assert "connection lost" in gone[0]
        job.finish()
        assert [near.wait(), far.wait()] == [0, 0], job.said()
