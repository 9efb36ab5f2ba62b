"""The same scenarios on torch's ``c10d`` rendezvous and on ours, with torch as the oracle.

Each scenario is one function over a meeting, run on both at the same time; both must give what the test
says. ``test_differs_from_c10d.py`` and docs/rendezvous.md have
what ours does otherwise.
"""

import socket
import time

import pytest

from lab.patience import PATIENCE, until
from tests.support.rendezvous_runs import (
    REMOVED_SOON,
    UNHURRIED,
    Both,
    Joining,
    RendezvousRun,
    Seen,
    connected,
    in_thread,
    places,
    shape,
    together,
    worlds,
)

# ---------------------------------------------------------------------- rounds


def test_a_round_is_complete_at_once_when_the_most_are_there(both: Both):
    def scenario(run: RendezvousRun) -> object:
        nodes = [run.node("1:3", last_call_timeout=110) for _ in range(3)]
        began = time.monotonic()
        infos = together(*nodes)
        return shape(infos), time.monotonic() - began < 100

    assert both(scenario) == (([0, 1, 2], {3}), True)


def test_ranks_follow_the_addresses_of_nodes_that_come_for_the_first_time(both: Both):
    def scenario(run: RendezvousRun) -> object:
        addresses = ["127.0.0.3", "127.0.0.1", "127.0.0.2"]
        return worlds(together(*(run.node("3", address) for address in addresses)))

    assert both(scenario) == [(2, 3), (0, 3), (1, 3)]


def test_a_round_with_the_fewest_is_complete_after_the_last_call(both: Both):
    def scenario(run: RendezvousRun) -> object:
        began = time.monotonic()
        infos = together(*(run.node("2:4", last_call_timeout=2) for _ in range(2)))
        return shape(infos), time.monotonic() - began >= 2

    assert both(scenario) == (([0, 1], {2}), True)


def test_node_that_comes_within_the_last_call_is_in_the_round(both: Both):
    def scenario(run: RendezvousRun) -> object:
        early = [Joining(run.node("2:4", last_call_timeout=8)) for _ in range(2)]
        until(lambda: run.seen().participants == 2)
        late = Joining(run.node("2:4", last_call_timeout=8))
        return shape([joining.info() for joining in [*early, late]])

    assert both(scenario) == ([0, 1, 2], {3})


def test_all_join_again_for_a_new_round_with_the_same_ranks(both: Both):
    def scenario(run: RendezvousRun) -> object:
        nodes = [run.node("2", address) for address in ("127.0.0.1", "127.0.0.2")]
        return [worlds(together(*nodes)) for _ in range(3)]

    assert both(scenario) == [[(0, 2), (1, 2)]] * 3


# ---------------------------------------------------------------------- those who come late


@pytest.mark.usefixtures("workers_host")
def test_a_latecomer_is_counted_and_let_in_when_the_members_join_again(both: Both):
    def scenario(run: RendezvousRun) -> object:
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
    def scenario(run: RendezvousRun) -> object:
        first = run.node("1:3", last_call_timeout=UNHURRIED)
        together(first)
        waiting = [Joining(run.node("1:3", last_call_timeout=UNHURRIED)) for _ in range(2)]
        until(lambda: first.num_nodes_waiting() == 2)
        again = Joining(first)
        return shape([joining.info() for joining in [again, *waiting]])

    assert both(scenario) == ([0, 1, 2], {3})


@pytest.mark.usefixtures("workers_host")
def test_redundant_node_is_admitted_when_a_member_dies(both: Both):
    def scenario(run: RendezvousRun) -> object:
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
    def scenario(run: RendezvousRun) -> object:
        first, dies, last = (
            run.node(
                "2:3", f"127.0.0.{number}", mortal=number == 2, last_call_timeout=UNHURRIED, **REMOVED_SOON
            )
            for number in (1, 2, 3)
        )
        before = worlds(together(first, dies, last))
        run.part(dies)
        until(lambda: run.seen().participants == 2)
        return before, shape(together(first, last))

    assert both(scenario) == ([(0, 3), (1, 3), (2, 3)], ([0, 1], {2}))


def test_too_few_nodes_time_out_and_ours_names_the_present_nodes(both: Both):
    said: dict[str, str] = {}

    def scenario(run: RendezvousRun) -> object:
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

    def scenario(run: RendezvousRun) -> object:
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
    def scenario(run: RendezvousRun) -> object:
        closer, comer = run.node("1"), run.node("1")
        before = closer.is_closed(), comer.is_closed()
        closer.set_closed()
        until(comer.is_closed)
        return before, closer.is_closed(), type(Joining(comer).error()).__name__

    assert both(scenario) == ((False, False), True, "RendezvousClosedError")


def test_nobody_joins_what_was_closed_after_a_round(both: Both):
    def scenario(run: RendezvousRun) -> object:
        first = run.node("1:2")
        together(first)
        first.set_closed()
        newcomer = type(Joining(run.node("1:2")).error()).__name__
        return newcomer, type(Joining(first).error()).__name__

    assert both(scenario) == ("RendezvousClosedError", "RendezvousClosedError")


def test_closing_ends_the_wait_for_a_round(both: Both):
    def scenario(run: RendezvousRun) -> object:
        waiting = Joining(run.node("2"))
        until(lambda: run.seen().participants == 1)
        run.node("2").set_closed()
        return type(waiting.error()).__name__

    assert both(scenario) == "RendezvousClosedError"


def test_closing_ends_the_wait_to_be_let_in(both: Both):
    def scenario(run: RendezvousRun) -> object:
        first = run.node("1:2")
        together(first)
        waiting = Joining(run.node("1:2"))
        until(lambda: first.num_nodes_waiting() == 1)
        first.set_closed()
        return type(waiting.error()).__name__, first.is_closed()

    assert both(scenario) == ("RendezvousClosedError", True)


def test_standby_node_ends_gracefully_when_the_job_is_over(both: Both):
    def scenario(run: RendezvousRun) -> object:
        first = run.node("1")
        together(first)
        standing_by = Joining(run.node("1"))
        until(lambda: run.seen().redundant == 1)
        return first.shutdown(), type(standing_by.error()).__name__

    assert both(scenario) == (True, "RendezvousGracefulExitError")


def test_the_others_of_the_round_see_that_it_is_closed_and_go_on(both: Both):
    def scenario(run: RendezvousRun) -> object:
        first, second = run.node("2"), run.node("2")
        infos = together(first, second)
        before = first.is_closed(), second.is_closed()
        first.set_closed()
        until(second.is_closed)
        infos[0].store.set("last", "word")
        return before, first.is_closed(), infos[1].store.get("last"), second.num_nodes_waiting()

    assert both(scenario) == ((False, False), True, b"word", 0)


def test_closing_and_shutting_down_twice_does_no_harm(both: Both):
    def scenario(run: RendezvousRun) -> object:
        first, second = run.node("2"), run.node("2")
        together(first, second)
        first.set_closed()
        first.set_closed()
        return first.shutdown(), first.shutdown(), second.shutdown(), first.is_closed(), second.is_closed()

    assert both(scenario) == (True, True, True, True, True)


def test_a_node_that_never_joined_can_be_shut_down(both: Both):
    def scenario(run: RendezvousRun) -> object:
        never = run.node("2")
        return never.num_nodes_waiting(), never.shutdown(), never.is_closed()

    assert both(scenario) == (0, True, True)


# ---------------------------------------------------------------------- what the agent and workers get


def test_the_handler_says_what_it_is(both: Both):
    def scenario(run: RendezvousRun) -> object:
        node = run.node("1")
        return node.get_backend() == run.backend, node.get_run_id() == run.run_id, node.use_agent_store

    assert both(scenario) == (True, True, True)


def test_agents_of_a_round_share_a_store_of_their_own(both: Both):
    def scenario(run: RendezvousRun) -> object:
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


def test_workers_find_the_store_of_rank_0(both: Both):
    def scenario(run: RendezvousRun) -> object:
        nodes = [run.node("2", f"127.0.0.{number}") for number in (1, 2)]
        infos = together(*nodes)
        one = len(set(places(infos))) == 1
        return one, places(infos)[0][0], [connected(info, f"from-{info.rank}") for info in infos]

    assert both(scenario) == (True, "127.0.0.1", [b"here", b"here"])


@pytest.mark.usefixtures("workers_host")
def test_workers_may_host_the_store_themselves(both: Both):
    def scenario(run: RendezvousRun) -> object:
        nodes = [run.node("2") for _ in range(2)]
        infos = together(*nodes)
        address, port = places(infos)[0]
        with socket.socket() as probe:
            nobody_listens = probe.connect_ex((address, port)) != 0
        return len(set(places(infos))), nobody_listens, [node.use_agent_store for node in nodes]

    assert both(scenario) == (1, True, [False, False])
