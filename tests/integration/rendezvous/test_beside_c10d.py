"""The same scenarios on torch's ``c10d`` rendezvous and on ours, with torch as the oracle.

Each scenario is one function over a meeting, run on both at the same time; both must give what the test
says. What ours does otherwise, on purpose, is at the end, side by side, and in docs/rendezvous.md.
"""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
)

import muster.worker
from lab.patience import PATIENCE, until
from lab.processes.coordinator import Coordinator
from tests.support.meeting import (
    REMOVED_SOON,
    Joining,
    Meeting,
    MusterMeeting,
    Seen,
    TorchMeeting,
    in_thread,
    kept_environment,
    meeting,
)

T = TypeVar("T")
Scenario = Callable[[Meeting], T]


class Each(Protocol):
    """Runs a scenario on both; returns what came of it in theirs and in ours."""

    def __call__(self, scenario: Scenario[T]) -> tuple[T, T]: ...


class Both(Protocol):
    """Runs a scenario on both, which must do the same; returns it."""

    def __call__(self, scenario: Scenario[T]) -> T: ...


@pytest.fixture
def workers_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers host their store: else torch 2.13 lets no newcomer through, as is shown below."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """One coordinator: every scenario is a run of its own."""
    folder: Path = tmp_path_factory.mktemp("coordinator")
    with kept_environment(), Coordinator(folder, session_ttl=3.0) as running:
        yield running
        muster.worker.close()


@pytest.fixture
def each(shared: Coordinator) -> Each:
    def run(scenario: Scenario[T]) -> tuple[T, T]:
        def play(made: Meeting) -> T:
            with meeting(made):
                return scenario(made)

        futures: list[Future[T]] = [
            in_thread(lambda: play(TorchMeeting())),
            in_thread(lambda: play(MusterMeeting(shared))),
        ]
        theirs, ours = [future.result(2 * PATIENCE) for future in futures]
        return theirs, ours

    return run


@pytest.fixture
def both(each: Each) -> Both:
    def run(scenario: Scenario[T]) -> T:
        theirs, ours = each(scenario)
        assert ours == theirs
        return ours

    return run


UNHURRIED = 5
"""Seconds of a last call in which more nodes than the fewest come. Those of ``c10d`` look once in a second,
and whoever comes later is waited for by nobody."""


def together(*handlers: RendezvousHandler) -> list[RendezvousInfo]:
    """All join, one after the other, and all are let in."""
    return [joining.info() for joining in [Joining(handler) for handler in handlers]]


def worlds(infos: list[RendezvousInfo]) -> list[tuple[int, int]]:
    return [(info.rank, info.world_size) for info in infos]


def shape(infos: list[RendezvousInfo]) -> tuple[list[int], set[int]]:
    """The ranks, whoever has them, and the world sizes."""
    return sorted(info.rank for info in infos), {info.world_size for info in infos}


# ---------------------------------------------------------------------- rounds


def test_a_round_is_complete_at_once_when_the_most_are_there(both: Both):
    def scenario(run: Meeting) -> object:
        nodes = [run.node("1:3", last_call_timeout=110) for _ in range(3)]
        began = time.monotonic()
        infos = together(*nodes)
        return shape(infos), time.monotonic() - began < 100

    assert both(scenario) == (([0, 1, 2], {3}), True)


def test_ranks_follow_the_addresses_of_nodes_that_come_for_the_first_time(both: Both):
    def scenario(run: Meeting) -> object:
        addresses = ["127.0.0.3", "127.0.0.1", "127.0.0.2"]
        return worlds(together(*(run.node("3", address) for address in addresses)))

    assert both(scenario) == [(2, 3), (0, 3), (1, 3)]


def test_a_round_with_the_fewest_is_complete_after_the_last_call(both: Both):
    def scenario(run: Meeting) -> object:
        began = time.monotonic()
        infos = together(*(run.node("2:4", last_call_timeout=2) for _ in range(2)))
        return shape(infos), time.monotonic() - began >= 2

    assert both(scenario) == (([0, 1], {2}), True)


def test_who_comes_within_the_last_call_is_in_the_round(both: Both):
    def scenario(run: Meeting) -> object:
        early = [Joining(run.node("2:4", last_call_timeout=8)) for _ in range(2)]
        until(lambda: run.seen().participants == 2)
        late = Joining(run.node("2:4", last_call_timeout=8))
        return shape([joining.info() for joining in [*early, late]])

    assert both(scenario) == ([0, 1, 2], {3})


def test_all_join_again_for_a_new_round_with_the_same_ranks(both: Both):
    def scenario(run: Meeting) -> object:
        nodes = [run.node("2", address) for address in ("127.0.0.1", "127.0.0.2")]
        return [worlds(together(*nodes)) for _ in range(3)]

    assert both(scenario) == [[(0, 2), (1, 2)]] * 3


# ---------------------------------------------------------------------- those who come late


@pytest.mark.usefixtures("workers_host")
def test_a_latecomer_is_counted_and_let_in_when_the_members_join_again(both: Both):
    def scenario(run: Meeting) -> object:
        first, late = run.node("1:2", "127.0.0.1"), run.node("1:2", "127.0.0.2")
        alone = worlds(together(first))
        counted = [first.num_nodes_waiting()]
        waiting = Joining(late)
        until(lambda: first.num_nodes_waiting() == 1)
        seen = run.seen()
        again = Joining(first)
        infos = [again.info(), waiting.info()]
        until(lambda: first.num_nodes_waiting() == 0)
        return alone, counted, seen, worlds(infos)

    assert both(scenario) == ([(0, 1)], [0], Seen(True, 1, 1, 0), [(0, 2), (1, 2)])


@pytest.mark.usefixtures("workers_host")
def test_two_latecomers_are_counted_and_let_in_together(both: Both):
    def scenario(run: Meeting) -> object:
        first = run.node("1:3", last_call_timeout=UNHURRIED)
        together(first)
        waiting = [Joining(run.node("1:3", last_call_timeout=UNHURRIED)) for _ in range(2)]
        until(lambda: first.num_nodes_waiting() == 2)
        again = Joining(first)
        return shape([joining.info() for joining in [again, *waiting]])

    assert both(scenario) == ([0, 1, 2], {3})


@pytest.mark.usefixtures("workers_host")
def test_a_redundant_node_stands_by_uncounted_and_is_let_in_when_a_member_dies(both: Both):
    def scenario(run: Meeting) -> object:
        stays, dies = (
            run.node(
                "1:2", f"127.0.0.{number}", mortal=number == 2, last_call_timeout=UNHURRIED, **REMOVED_SOON
            )
            for number in (1, 2)
        )
        together(stays, dies)
        third = Joining(run.node("1:2", "127.0.0.3", last_call_timeout=UNHURRIED, **REMOVED_SOON))
        until(lambda: run.seen().redundant == 1)
        standing_by = run.seen(), stays.num_nodes_waiting()
        run.part(dies)
        until(lambda: stays.num_nodes_waiting() == 1)
        again = Joining(stays)
        return standing_by, worlds([again.info(), third.info()])

    assert both(scenario) == ((Seen(True, 2, 0, 1), 0), [(0, 2), (1, 2)])


# ---------------------------------------------------------------------- those who go


def test_a_node_that_dies_is_removed_and_the_others_form_a_round(both: Both):
    def scenario(run: Meeting) -> object:
        first, dies, last = (
            run.node(
                "2:3", f"127.0.0.{number}", mortal=number == 2, last_call_timeout=UNHURRIED, **REMOVED_SOON
            )
            for number in (1, 2, 3)
        )
        before = worlds(together(first, dies, last))
        run.part(dies)
        until(lambda: run.seen().participants == 2)
        counted = [first.num_nodes_waiting(), last.num_nodes_waiting()]
        return before, counted, shape(together(first, last))

    assert both(scenario) == ([(0, 3), (1, 3), (2, 3)], [0, 0], ([0, 1], {2}))


def test_too_few_nodes_time_out_and_ours_says_who_was_there(both: Both):
    said: dict[str, str] = {}

    def scenario(run: Meeting) -> object:
        error = Joining(run.node("2", join_timeout=4)).error()
        said[run.backend] = str(error)
        return type(error).__name__, run.seen()

    assert both(scenario) == ("RendezvousTimeoutError", Seen())
    assert said["c10d"] == ""
    assert (
        "did not come together within the join timeout of 4 s: 1 of 2 nodes had joined: 127.0.0.1 (pid "
        in said["muster"]
    )


def test_a_latecomer_that_nobody_lets_in_times_out_and_the_round_goes_on(both: Both):
    said: dict[str, str] = {}

    def scenario(run: Meeting) -> object:
        first = run.node("1:2")
        together(first)
        error = Joining(run.node("1:2", join_timeout=2)).error()
        until(lambda: first.num_nodes_waiting() == 0)
        said[run.backend] = str(error)
        return type(error).__name__, run.seen(), first.is_closed()

    assert both(scenario) == ("RendezvousTimeoutError", Seen(True, 1, 0, 0), False)
    assert said["c10d"] == ""
    assert "let nobody in within the join timeout of 2 s; waiting: 127.0.0.1 (pid " in said["muster"]


# ---------------------------------------------------------------------- the closed state


def test_nobody_joins_what_was_closed_before_anyone_came(both: Both):
    def scenario(run: Meeting) -> object:
        closer, comer = run.node("1"), run.node("1")
        before = closer.is_closed(), comer.is_closed()
        closer.set_closed()
        until(comer.is_closed)
        return before, closer.is_closed(), type(Joining(comer).error()).__name__

    assert both(scenario) == ((False, False), True, "RendezvousClosedError")


def test_nobody_joins_what_was_closed_after_a_round(both: Both):
    def scenario(run: Meeting) -> object:
        first = run.node("1:2")
        together(first)
        first.set_closed()
        newcomer = type(Joining(run.node("1:2")).error()).__name__
        return newcomer, type(Joining(first).error()).__name__

    assert both(scenario) == ("RendezvousClosedError", "RendezvousClosedError")


def test_closing_ends_the_wait_for_a_round(both: Both):
    def scenario(run: Meeting) -> object:
        waiting = Joining(run.node("2"))
        until(lambda: run.seen().participants == 1)
        run.node("2").set_closed()
        return type(waiting.error()).__name__

    assert both(scenario) == "RendezvousClosedError"


def test_closing_ends_the_wait_to_be_let_in(both: Both):
    def scenario(run: Meeting) -> object:
        first = run.node("1:2")
        together(first)
        waiting = Joining(run.node("1:2"))
        until(lambda: first.num_nodes_waiting() == 1)
        first.set_closed()
        return type(waiting.error()).__name__, first.is_closed()

    assert both(scenario) == ("RendezvousClosedError", True)


def test_who_stands_by_ends_gracefully_when_the_job_is_over(both: Both):
    def scenario(run: Meeting) -> object:
        first = run.node("1")
        together(first)
        standing_by = Joining(run.node("1"))
        until(lambda: run.seen().redundant == 1)
        return first.shutdown(), type(standing_by.error()).__name__

    assert both(scenario) == (True, "RendezvousGracefulExitError")


def test_the_others_of_the_round_see_that_it_is_closed_and_go_on(both: Both):
    def scenario(run: Meeting) -> object:
        first, second = run.node("2"), run.node("2")
        infos = together(first, second)
        before = first.is_closed(), second.is_closed()
        first.set_closed()
        until(second.is_closed)
        infos[0].store.set("last", "word")
        return before, first.is_closed(), infos[1].store.get("last"), second.num_nodes_waiting()

    assert both(scenario) == ((False, False), True, b"word", 0)


def test_closing_and_shutting_down_twice_does_no_harm(both: Both):
    def scenario(run: Meeting) -> object:
        first, second = run.node("2"), run.node("2")
        together(first, second)
        first.set_closed()
        first.set_closed()
        return first.shutdown(), first.shutdown(), second.shutdown(), first.is_closed(), second.is_closed()

    assert both(scenario) == (True, True, True, True, True)


def test_a_node_that_never_joined_can_be_shut_down(both: Both):
    def scenario(run: Meeting) -> object:
        never = run.node("2")
        return never.num_nodes_waiting(), never.shutdown(), never.is_closed()

    assert both(scenario) == (0, True, True)


# ---------------------------------------------------------------------- what the agent and workers get


def test_the_handler_says_what_it_is(both: Both):
    def scenario(run: Meeting) -> object:
        node = run.node("1")
        return node.get_backend() == run.backend, node.get_run_id() == run.run_id, node.use_agent_store

    assert both(scenario) == (True, True, True)


def test_the_agents_of_a_round_share_a_store_that_the_next_round_does_not_see(both: Both):
    def scenario(run: Meeting) -> object:
        nodes = [run.node("2") for _ in range(2)]
        first, second = together(*nodes)
        first.store.set("from", str(first.rank))
        second.store.set("bytes", b"\x00\xff")  # type: ignore[arg-type]  # torch's stubs know of str alone
        got = second.store.get("from") == str(first.rank).encode(), first.store.get("bytes")
        sum = first.store.add("count", 2), second.store.add("count", 3)
        there = second.store.check(["from", "bytes", "count"])
        late = in_thread(lambda: second.store.get("later"))
        first.store.set("later", "on")
        again, _ = together(*nodes)
        return got, sum, there, late.result(PATIENCE), again.store.check(["from"])

    assert both(scenario) == ((True, b"\x00\xff"), (2, 5), True, b"on", False)


def connected(info: RendezvousInfo, key: str) -> bytes:
    """What a worker does: a TCPStore client of the agents' store. Returns what it reads back."""
    where = info.bootstrap_store_info
    assert where is not None
    timeout = timedelta(seconds=PATIENCE)
    store = dist.TCPStore(where.master_addr, where.master_port, is_master=False, timeout=timeout)
    store.set(key, "here")
    return store.get(key)


def places(infos: list[RendezvousInfo]) -> list[tuple[str, int]]:
    found = [info.bootstrap_store_info for info in infos]
    return [(where.master_addr, where.master_port) for where in found if where is not None]


def test_workers_find_the_store_of_rank_0(both: Both):
    def scenario(run: Meeting) -> object:
        nodes = [run.node("2", f"127.0.0.{number}") for number in (1, 2)]
        infos = together(*nodes)
        one = len(set(places(infos))) == 1
        return one, places(infos)[0][0], [connected(info, f"from-{info.rank}") for info in infos]

    assert both(scenario) == (True, "127.0.0.1", [b"here", b"here"])


@pytest.mark.usefixtures("workers_host")
def test_workers_may_host_the_store_themselves(both: Both):
    def scenario(run: Meeting) -> object:
        nodes = [run.node("2") for _ in range(2)]
        infos = together(*nodes)
        address, port = places(infos)[0]
        with socket.socket() as probe:
            nobody_listens = probe.connect_ex((address, port)) != 0
        return len(set(places(infos))), nobody_listens, [node.use_agent_store for node in nodes]

    assert both(scenario) == (1, True, [False, False])


# ---------------------------------------------------------------------- where theirs goes wrong


def test_workers_are_sent_to_the_rank_0_that_has_gone_in_theirs_and_not_in_ours(each: Each):
    def scenario(run: Meeting) -> tuple[list[tuple[str, int]], tuple[str, int]]:
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


def test_a_newcomer_never_hears_where_rank_0_is_in_theirs_and_does_in_ours(each: Each):
    """Rank 0 tells it once in the life of its handler, and each round has a store of its own."""

    def scenario(run: Meeting) -> tuple[Any, Any]:
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
    def scenario(run: Meeting) -> object:
        dies = run.node("2", "127.0.0.2", mortal=True, keep_alive_interval=30)
        Joining(dies)
        until(lambda: run.seen().participants == 1)
        run.part(dies)
        if isinstance(run, MusterMeeting):
            until(lambda: not run.show().nodes[0].connected)
        comer = Joining(run.node("2", "127.0.0.1", join_timeout=2, keep_alive_interval=30))
        return comer.info().world_size if run.backend == "c10d" else str(comer.error())

    theirs, ours = each(scenario)
    assert theirs == 2
    assert "did not come together within the join timeout of 2 s: 2 of 2 nodes had joined" in str(ours)


def test_a_node_whose_connection_broke_is_lost_in_theirs_and_joins_anew_in_ours(each: Each):
    def scenario(run: Meeting) -> object:
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
        anew = Joining(cut_off)
        until(lambda: stays.num_nodes_waiting() == 1)
        again = Joining(stays)
        return worlds([again.info(), anew.info()])

    theirs, ours = each(scenario)
    assert theirs == Seen(True, 1, 0, 0)
    assert ours == [(0, 2), (1, 2)]


# ---------------------------------------------------------------------- what ours does otherwise


def test_node_10_comes_before_node_2_in_theirs_and_after_it_in_ours(each: Each):
    def scenario(run: Meeting) -> object:
        return worlds(together(run.node("2", "127.0.0.10"), run.node("2", "127.0.0.2")))

    assert each(scenario) == ([(0, 2), (1, 2)], [(1, 2), (0, 2)])


def test_a_newcomer_takes_rank_0_away_in_theirs_and_not_in_ours(each: Each):
    def scenario(run: Meeting) -> object:
        first = run.node("1:2", "127.0.0.2")
        together(first)
        newcomer = Joining(run.node("1:2", "127.0.0.1"))
        until(lambda: first.num_nodes_waiting() == 1)
        again = Joining(first)
        return worlds([again.info(), newcomer.info()])

    assert each(scenario) == ([(1, 2), (0, 2)], [(0, 2), (1, 2)])


def test_nodes_that_disagree_are_let_in_by_theirs_and_told_by_ours(each: Each):
    def scenario(run: Meeting) -> object:
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


def test_who_was_in_the_round_is_let_in_before_who_stood_by(shared: Coordinator):
    """In theirs it is a race."""
    with meeting(MusterMeeting(shared)) as run:
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
