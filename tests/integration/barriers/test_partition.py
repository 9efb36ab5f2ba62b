"""Ranks that are away for longer than the session TTL, while a new process begins their group again."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from lab.processes.coordinator import Coordinator
from lab.processes.proxy import Proxy
from tests.support.ranks import Heard, Rank, assert_good_history, everyone, ranks
from tests.support.waiters import wait_for_arrivals


@pytest.fixture
def network(coordinator: Coordinator) -> Iterator[Proxy]:
    """Between ranks 1 and 2 and the coordinator."""
    with Proxy(coordinator.port) as network:
        yield network


@pytest.fixture
def lost(coordinator: Coordinator, network: Proxy) -> Iterator[list[Rank]]:
    """Ranks 0 to 2, which arrived at #0 and are away; only rank 0 has heard of the release."""
    with ExitStack() as stack:
        near = stack.enter_context(Proxy(coordinator.port))
        (zero,) = stack.enter_context(ranks(near.endpoint, 3, 0))
        others = stack.enter_context(ranks(network.endpoint, 3, 1, 2))
        for rank in others:
            rank.tell("barrier")
        wait_for_arrivals(coordinator.endpoint, 2)
        network.black_hole()
        assert zero.ask("barrier").outcome == "RELEASED"
        for proxy in (near, network):
            proxy.cut(refuse=True)
        coordinator.logged("member.gone", 3)
        assert not any(rank.has_answered() for rank in others)
        yield [zero, *others]


def outcomes(heard: list[Heard]) -> list[tuple[str, int]]:
    return [(one.outcome, one.sequence) for one in heard]


def test_rank_hears_its_release_when_a_new_process_came_first(
    coordinator: Coordinator, network: Proxy, lost: list[Rank]
):
    with ranks(coordinator.endpoint, 3, 0) as (new,):
        assert new.ask("join").outcome == "JOINED"
        network.heal()
        assert outcomes([rank.answer() for rank in lost[1:]]) == [("RELEASED", 0)] * 2
        assert outcomes(everyone([new, *lost[1:]])) == [("RELEASED", 1)] * 3
        assert_good_history([new, *lost])


def test_rank_rejoins_at_the_current_barrier_when_it_missed_a_release(
    coordinator: Coordinator, network: Proxy, lost: list[Rank]
):
    with ranks(coordinator.endpoint, 1, 0) as (alone,):
        assert outcomes([alone.ask("barrier")]) == [("RELEASED", 1)]
        alone.ask("goodbye")
    network.heal()
    assert [rank.answer().reason for rank in lost[1:]] == ["SEQUENCE_BEHIND"] * 2
    with ranks(coordinator.endpoint, 3, 0) as (new,):
        assert outcomes(everyone([new, *lost[1:]])) == [("RELEASED", 2)] * 3
