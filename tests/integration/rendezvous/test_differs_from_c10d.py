"""Where torch's ``c10d`` rendezvous goes wrong, and what ours does otherwise on purpose, side by side."""

from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
)

from lab.patience import until
from lab.processes.coordinator import Coordinator
from muster.worker.exit_barrier import ARRIVED
from muster.worker.rendezvous import MusterRendezvousHandler
from tests.support.rendezvous_runs import (
    REMOVED_SOON,
    UNHURRIED,
    Each,
    Joining,
    MusterRendezvous,
    RendezvousRun,
    Seen,
    connected,
    meeting,
    places,
    together,
    worlds,
)


def test_workers_are_sent_to_a_dead_rank_0_only_by_theirs(each: Each):
    def scenario(run: RendezvousRun) -> tuple[list[tuple[str, int]], tuple[str, int]]:
        nodes = [
            run.node(
                "2:3", f"127.0.0.{number}", mortal=number == 1, last_call_timeout=UNHURRIED, **REMOVED_SOON
            )
            for number in (1, 2, 3)
        ]
        gone = places(together(*nodes))[0]
        run.part(nodes[0])
        until(lambda: run.seen().participants == 2)
        infos = together(*nodes[1:])
        assert sorted(info.rank for info in infos) == [0, 1]
        assert gone[0] == "127.0.0.1"
        if run.backend == "muster":
            assert [connected(info, f"from-{info.rank}") for info in infos] == [b"here", b"here"]
        return places(sorted(infos, key=lambda info: info.rank)), gone

    (theirs, gone), (ours, _) = each(scenario)
    assert theirs[0][0] == "127.0.0.2"
    assert theirs[1] == gone, "rank 1 looks where rank 0 was"
    assert ours[0] == ours[1]
    assert ours[0][0] in ("127.0.0.2", "127.0.0.3")


def test_nodes_of_a_round_hear_only_in_ours_that_it_lost_one(each: Each):
    def scenario(run: RendezvousRun) -> tuple[list[int], list[int]]:
        nodes = [
            run.node(
                "2:3", f"127.0.0.{number}", mortal=number == 3, last_call_timeout=UNHURRIED, **REMOVED_SOON
            )
            for number in (1, 2, 3)
        ]
        together(*nodes)
        run.part(nodes[2])
        until(lambda: run.seen().participants == 2)
        if run.backend == "muster":
            until(lambda: [node.num_nodes_waiting() for node in nodes[:2]] == [1, 1])
        waiting = [node.num_nodes_waiting() for node in nodes[:2]]
        again = together(*nodes[:2])
        return waiting, [info.world_size for info in again]

    assert each(scenario) == (([0, 0], [2, 2]), ([1, 1], [2, 2]))


def test_nodes_that_wait_at_the_exit_do_not_go_on_without_a_lost_one(each: Each):
    def scenario(run: RendezvousRun) -> list[int]:
        nodes = [
            run.node(
                "1:2", f"127.0.0.{number}", mortal=number == 2, last_call_timeout=UNHURRIED, **REMOVED_SOON
            )
            for number in (1, 2)
        ]
        infos = together(*nodes)
        infos[1].store.add(ARRIVED, 1)
        run.part(nodes[1])
        until(lambda: run.seen().participants == 1)
        stays = nodes[0]
        if isinstance(stays, MusterRendezvousHandler):
            until(lambda: stays._membership.nodes_lost == 1)
        return [stays.num_nodes_waiting() for _ in range(3)]

    assert each(scenario) == ([0, 0, 0], [0, 0, 0])


def test_a_newcomer_never_hears_where_rank_0_is_in_theirs_and_does_in_ours(each: Each):
    """Rank 0 tells it once in the life of its handler, and each round has a store of its own."""

    def scenario(run: RendezvousRun) -> tuple[Any, Any]:
        first = run.node("1:2", "127.0.0.1", read_timeout=3)
        together(first)
        newcomer = Joining(run.node("1:2", "127.0.0.2", read_timeout=3))
        until(lambda: first.num_nodes_waiting() == 1)
        again = Joining(first).info()
        if run.backend == "c10d":
            return again.world_size, str(newcomer.error())
        infos = [again, newcomer.info()]
        return [connected(info, f"from-{info.rank}") for info in infos], len(set(places(infos)))

    theirs, ours = each(scenario)
    assert theirs[0] == 2
    assert "MASTER_ADDR" in theirs[1]
    assert ours == ([b"here", b"here"], 1)


def test_a_round_is_begun_with_a_dead_node_in_theirs_and_not_in_ours(each: Each):
    def scenario(run: RendezvousRun) -> object:
        dies = run.node("2", "127.0.0.2", mortal=True, keep_alive_interval=30)
        Joining(dies)
        until(lambda: run.seen().participants == 1)
        run.part(dies)
        if isinstance(run, MusterRendezvous):
            until(lambda: not run.show().nodes[0].connected)
        comer = Joining(run.node("2", "127.0.0.1", join_timeout=2, keep_alive_interval=30))
        return comer.info().world_size if run.backend == "c10d" else str(comer.error())

    theirs, ours = each(scenario)
    assert theirs == 2
    assert "did not come together within the join timeout of 2 s: 2 of 2 nodes had joined" in str(ours)


def test_node_with_a_broken_connection_rejoins_only_in_ours(each: Each):
    def scenario(run: RendezvousRun) -> object:
        stays, cut_off = (
            run.node(
                "1:2", f"127.0.0.{number}", mortal=number == 2, last_call_timeout=UNHURRIED, **REMOVED_SOON
            )
            for number in (1, 2)
        )
        together(stays, cut_off)
        run.part(cut_off)
        until(lambda: run.seen().participants == 1)
        run.heal(cut_off)
        if run.backend == "c10d":
            with pytest.raises(RendezvousConnectionError):
                cut_off.num_nodes_waiting()
            return run.seen()
        until(lambda: cut_off.num_nodes_waiting() == 1)
        newcomer = Joining(cut_off)
        until(lambda: stays.num_nodes_waiting() == 1)
        again = Joining(stays)
        return worlds([again.info(), newcomer.info()])

    theirs, ours = each(scenario)
    assert theirs == Seen(True, 1, 0, 0)
    assert ours == [(0, 2), (1, 2)]


def test_node_10_comes_before_node_2_in_theirs_and_after_it_in_ours(each: Each):
    def scenario(run: RendezvousRun) -> object:
        return worlds(together(run.node("2", "127.0.0.10"), run.node("2", "127.0.0.2")))

    assert each(scenario) == ([(0, 2), (1, 2)], [(1, 2), (0, 2)])


def test_a_newcomer_takes_rank_0_away_in_theirs_and_not_in_ours(each: Each):
    def scenario(run: RendezvousRun) -> object:
        first = run.node("1:2", "127.0.0.2")
        together(first)
        newcomer = Joining(run.node("1:2", "127.0.0.1"))
        until(lambda: first.num_nodes_waiting() == 1)
        again = Joining(first)
        return worlds([again.info(), newcomer.info()])

    assert each(scenario) == ([(1, 2), (0, 2)], [(0, 2), (1, 2)])


def test_nodes_that_disagree_are_let_in_by_theirs_and_told_by_ours(each: Each):
    def scenario(run: RendezvousRun) -> object:
        first = Joining(run.node("2:3", last_call_timeout=1))
        until(lambda: run.seen().participants == 1)
        second = Joining(run.node("2:4", last_call_timeout=1))
        if run.backend == "c10d":
            return worlds([first.info(), second.info()])
        return f"{type(second.error()).__name__}: {second.error()}"

    theirs, ours = each(scenario)
    assert theirs == [(0, 2), (1, 2)]
    assert str(ours).startswith("RendezvousStateError: ")
    assert "asks for 2 to 4 nodes" in str(ours)
    assert "for 2 to 3 nodes" in str(ours)


def test_member_of_the_round_is_admitted_before_a_standby_node(shared: Coordinator):
    """In theirs it is a race."""
    with meeting(MusterRendezvous(shared)) as run:
        first, second = run.node("2"), run.node("2")
        before = worlds(together(first, second))
        standing_by = Joining(run.node("2"))
        until(lambda: run.seen().redundant == 1)
        again = Joining(first)
        # Its place is free, so that the third is in front of the second.
        until(lambda: run.seen().waiting == 2)
        assert worlds([Joining(second).info(), again.info()]) == before[::-1]
        until(lambda: run.seen() == Seen(True, 2, 0, 1))
        assert not standing_by.done
