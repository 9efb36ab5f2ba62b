"""How the nodes of a run come together, wait, go and come again."""

import pytest

from muster.service.core.rendezvous.nodes import natural
from muster.service.core.rendezvous.rendezvous import MAX_DEPARTED, ROUND_HISTORY
from muster.service.core.vocabulary.effects import ForgetRound, NodeLeft, RoundComplete
from muster.service.core.vocabulary.events import CloseRun, Evict, LeaveRendezvous, Tick
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import NodeInfo, NodeStanding
from muster.service.core.vocabulary.refusal import Reason
from tests.support.expect import some
from tests.support.world.core_client import CKPT
from tests.support.world.core_disk import Crash
from tests.support.world.core_world import RUN
from tests.support.world.rendezvous_world import JOIN, KEEP_ALIVE, LAST_CALL, RendezvousWorld, nodes

PARTICIPANT, WAITING, REDUNDANT = NodeStanding


@pytest.fixture
def pair():
    """Two nodes, a and b, in round 0; up to three may be in a round."""
    world = RendezvousWorld(nodes(2, 3))
    world.several("a", "b")
    world.wait(LAST_CALL)
    assert world.ranks_of(*world.agents) == [0, 1]
    return world


@pytest.fixture
def full():
    """Two nodes, a and b, in round 0, which takes no more."""
    world = RendezvousWorld(nodes(2))
    world.several("a", "b")
    assert world.ranks_of(*world.agents) == [0, 1]
    return world


# ---------------------------------------------------------------------- completion


def test_a_round_is_complete_at_once_when_the_most_are_there():
    world = RendezvousWorld(nodes(1, 3))
    a, b = world.several("a", "b")
    assert (a.stands, b.stands) == (PARTICIPANT, PARTICIPANT)
    assert "round 0 of run job1 comes together: 2 of 1 to 3 nodes have joined" in some(b.standing).message
    c = world.agent("c")
    assert world.ranks_of(a, b, c) == [0, 1, 2]
    assert {some(one.place).world_size for one in (a, b, c)} == {3}


def test_a_round_is_complete_when_the_last_call_after_the_fewest_is_over():
    world = RendezvousWorld(nodes(2, 4))
    a = world.agent("a")
    world.wait(100)
    b = world.agent("b")
    world.wait(10)
    c = world.agent("c")
    world.wait(LAST_CALL - 10.1)
    assert not world.completed
    world.wait(0.2)
    assert world.ranks_of(a, b, c) == [0, 1, 2]
    assert world.completed[0].join_seconds == pytest.approx(130)


def test_the_last_call_is_ended_when_too_few_are_left():
    world = RendezvousWorld(nodes(2, 3))
    a, b = world.several("a", "b")
    world.wait(20)
    assert b.leave()
    world.wait(20)
    c = world.agent("c")
    world.wait(LAST_CALL - 1)
    assert not world.completed
    world.wait(1)
    assert world.ranks_of(a, c) == [0, 1]


def test_one_node_alone_is_a_round():
    world = RendezvousWorld(nodes(1))
    assert world.agent("a").place == RoundComplete(0, 0, 1)


def test_a_round_is_not_begun_with_a_node_whose_stream_is_lost():
    world = RendezvousWorld(nodes(2, 3))
    a, b = world.several("a", "b")
    world.wait(20)
    b.lose_stream()
    world.wait(12)
    assert not world.completed
    b.connect()
    assert world.ranks_of(a, b) == [0, 1]


def test_a_node_that_is_lost_before_the_round_is_complete_is_not_waited_for_longer_than_its_keep_alive():
    world = RendezvousWorld(nodes(2, 3))
    a, b = world.several("a", "b")
    b.lose_stream()
    c = world.agent("c")
    assert not world.completed
    world.wait(KEEP_ALIVE)
    assert not world.completed
    world.wait(LAST_CALL - KEEP_ALIVE)
    assert world.ranks_of(a, b, c) == [0, None, 1]
    assert [(one.info.address, one.reason) for one in world.rendezvous.departed] == [("b", "connection lost")]


def test_a_full_round_that_waits_for_a_lost_node_takes_no_more_than_the_most():
    world = RendezvousWorld(nodes(2))
    a = world.agent("a")
    a.lose_stream()
    b, c = world.several("b", "c")
    assert (b.stands, c.stands) == (PARTICIPANT, REDUNDANT)
    a.connect()
    assert world.ranks_of(a, b, c) == [0, 1, None]
    world.assert_told()


def test_who_stands_by_while_a_round_comes_together_takes_the_place_of_one_who_is_gone():
    world = RendezvousWorld(nodes(2))
    a = world.agent("a")
    a.lose_stream()
    b, c = world.several("b", "c")
    world.wait(KEEP_ALIVE)
    assert world.ranks_of(b, c) == [0, 1]
    world.assert_told()


# ---------------------------------------------------------------------- ranks


@pytest.mark.parametrize(
    ("addresses", "order"),
    [
        (["node-10", "node-9", "node-2"], ["node-2", "node-9", "node-10"]),
        (["10.0.0.10", "10.0.0.9"], ["10.0.0.9", "10.0.0.10"]),
        (["b", "1", "a", ""], ["", "1", "a", "b"]),
        (["rack2-node1", "rack1-node10", "rack1-node9"], ["rack1-node9", "rack1-node10", "rack2-node1"]),
        (["n²", "n1", "n٣"], ["n1", "n²", "n٣"]),
    ],
)
def test_addresses_are_ordered_as_people_count(addresses, order):
    assert sorted(addresses, key=natural) == order


def test_ranks_follow_the_addresses_and_then_the_arrivals():
    world = RendezvousWorld(nodes(4))
    ten, two, first, second = world.several("node-10", "node-2", "node-3", "node-3")
    assert world.ranks_of(two, first, second, ten) == [0, 1, 2, 3]


def test_who_stays_keeps_its_rank():
    world = RendezvousWorld(nodes(2, 3))
    x, y, z = world.several("x", "y", "z")
    y.leave()
    a = world.agent("a")
    z.join()
    x.join()
    assert world.ranks_of(x, a, z) == [0, 1, 2]
    assert {some(one.place).round for one in (x, a, z)} == {1}


def test_a_rank_beyond_the_smaller_world_is_given_anew():
    world = RendezvousWorld(nodes(2, 3))
    a, b, c = world.several("a", "b", "c")
    a.leave()
    b.join()
    c.join()
    world.wait(LAST_CALL)
    assert world.ranks_of(b, c) == [1, 0]


# ---------------------------------------------------------------------- waiting and standing by


def test_who_comes_to_a_complete_round_waits_and_its_nodes_are_told(pair):
    a, b = pair.agents
    c = pair.agent("c")
    assert c.stands is WAITING
    assert "round 0 of run job1 is complete, with 2 nodes in it" in c.standing.message
    assert (a.waiting, b.waiting) == (1, 1)


def test_how_many_wait_is_told_at_most_once_a_second_and_the_latest_count_in_the_end(pair):
    a, b = pair.agents
    started = pair.now
    pair.several("c", "d", "e")
    pair.wait(0.5)
    pair.agent("f").leave()
    pair.agent("g")
    assert a.told_waiting == [(started, 1)]
    pair.wait(1)
    assert a.told_waiting == [(started, 1), (started + 1, 4)]
    pair.wait(5)
    assert a.told_waiting == b.told_waiting
    assert len(a.told_waiting) == 2


def test_a_count_that_is_as_it_was_is_not_told_again(pair):
    a, _ = pair.agents
    pair.agent("c")
    pair.agent("d").leave()
    pair.wait(5)
    assert [count for _, count in a.told_waiting] == [1]


def test_a_node_that_comes_back_is_told_how_many_wait_now(pair):
    a, b = pair.agents
    c = pair.agent("c")
    a.lose_stream()
    c.leave()
    pair.wait(2)
    assert (a.waiting, b.waiting) == (1, 0)
    a.connect()
    assert a.waiting == 0


def test_nobody_waits_after_a_restart_until_they_have_come_back(pair):
    a, b = pair.agents
    c = pair.agent("c")
    pair.crash()
    a.connect()
    assert a.waiting == 0
    c.connect()
    b.connect()
    pair.wait(1)
    assert (a.waiting, b.waiting) == (1, 1)


def test_who_comes_to_a_full_round_stands_by_and_nobody_is_told(full):
    c = full.agent("c")
    assert c.stands is REDUNDANT
    assert [one.told_waiting for one in full.agents] == [[], [], []]


def test_who_stands_by_waits_when_a_place_is_free(full):
    a, b = full.agents
    c, d = full.several("c", "d")
    b.leave()
    assert (c.stands, d.stands) == (WAITING, WAITING)
    assert a.waiting == 2
    a.join()
    assert full.ranks_of(a, c, d) == [0, 1, None]
    assert d.stands is REDUNDANT
    full.assert_told()


def test_who_stands_by_does_so_without_end(full):
    c = full.agent("c")
    full.wait(10 * JOIN)
    assert (c.stands, c.reason) == (REDUNDANT, None)


def test_the_wait_of_who_stood_by_begins_when_a_place_is_free(full):
    _, b = full.agents
    c = full.agent("c")
    full.wait(10 * JOIN)
    b.leave()
    full.wait(JOIN - 1)
    assert c.stands is WAITING
    full.wait(1)
    assert c.reason is Reason.RENDEZVOUS_TIMED_OUT


def test_the_wait_of_who_stood_by_begins_when_all_of_the_round_go_at_once(full):
    a, b = full.agents
    c = full.agent("c")
    full.wait(10 * JOIN)
    a.lose_stream()
    b.lose_stream()
    full.wait(KEEP_ALIVE)
    assert (c.stands, c.reason) == (PARTICIPANT, None)
    d = full.agent("d")
    assert full.ranks_of(c, d) == [0, 1]
    assert full.completed[-1].join_seconds == 0


# ---------------------------------------------------------------------- the next round


def test_the_next_round_comes_together_when_all_have_left_the_old_one(pair):
    a, b = pair.agents
    c = pair.agent("c")
    a.join()
    assert (a.stands, c.stands) == (WAITING, WAITING)
    b.join()
    assert pair.ranks_of(a, b, c) == [0, 1, 2]
    assert [one.round for one in pair.completed] == [0, 1]
    pair.assert_told()


def test_who_was_in_the_last_round_is_let_in_before_newcomers():
    world = RendezvousWorld(nodes(2))
    a, b = world.several("a", "b")
    b.lose_stream()
    world.wait(KEEP_ALIVE)
    new = world.agent("new")
    newer = world.agent("newer")
    assert (new.stands, newer.stands) == (WAITING, WAITING)
    a.join()
    assert world.ranks_of(a, new, newer) == [0, 1, None]
    assert newer.stands is REDUNDANT


def test_the_old_round_ends_when_its_last_node_is_lost(pair):
    a, b = pair.agents
    c, d = pair.several("c", "d")
    a.leave("done")
    b.lose_stream()
    pair.wait(KEEP_ALIVE)
    pair.wait(LAST_CALL)
    assert pair.ranks_of(c, d) == [0, 1]
    assert c.place.round == 1


def test_a_lone_node_may_ask_for_other_settings(full):
    a, b = full.agents
    b.leave()
    a.settings = nodes(1)
    a.join()
    assert a.place == RoundComplete(1, 0, 1)


# ---------------------------------------------------------------------- streams that break


def test_a_node_in_a_round_comes_back_to_it(pair):
    a, _ = pair.agents
    a.lose_stream()
    pair.wait(KEEP_ALIVE - 1)
    a.connect()
    assert a.rounds == [RoundComplete(0, 0, 2)]
    pair.wait(10 * KEEP_ALIVE)
    pair.assert_told()
    assert not pair.rendezvous.departed


def test_a_node_that_waits_comes_back_to_its_place(pair):
    c = pair.agent("c")
    c.lose_stream()
    pair.wait(KEEP_ALIVE - 1)
    c.connect()
    assert c.stands is WAITING
    pair.assert_told()
    joined = [node.joined_at for node in pair.rendezvous.of(WAITING)]
    assert joined == [pair.now - KEEP_ALIVE + 1]


def test_a_node_that_never_heard_of_its_round_is_told_when_it_comes_back():
    world = RendezvousWorld(nodes(2))
    a = world.agent("a")
    a.breaks(some(a.session))
    b = world.agent("b")
    assert world.ranks_of(a, b) == [None, 1]
    a.connect()
    assert a.rank == 0


def test_a_second_stream_replaces_the_first(pair):
    a, _ = pair.agents
    a.connect()
    assert [one.reason for one in a.old_refusals] == [Reason.SESSION_REPLACED]
    pair.assert_told()
    pair.wait(10 * KEEP_ALIVE)
    pair.assert_told()


def test_a_node_whose_stream_does_not_come_back_loses_its_place(pair):
    _, b = pair.agents
    b.lose_stream()
    lost = pair.now
    pair.wait(KEEP_ALIVE)
    assert pair.rendezvous.find(b.incarnation) is None
    (gone,) = pair.rendezvous.departed
    assert (gone.info, gone.round, gone.reason, gone.at) == (b.info, 0, "connection lost", lost)


def test_a_node_that_was_removed_is_told_when_it_comes_back_and_may_join_anew(pair):
    a, b = pair.agents
    b.lose_stream()
    pair.wait(KEEP_ALIVE)
    b.connect()
    assert b.reason is Reason.NODE_REMOVED
    assert "is not in round 0 of run job1 any more (connection lost). End its workers" in b.refusal.message
    b.join()
    a.join()
    pair.wait(LAST_CALL)
    assert pair.ranks_of(a, b) == [0, 1]
    assert b.place.round == 1


def test_a_node_that_comes_back_to_a_round_that_is_over_is_told(pair):
    a, b = pair.agents
    a.lose_stream()
    pair.wait(KEEP_ALIVE)
    b.join()
    c = pair.agent("c")
    pair.wait(LAST_CALL)
    assert (b.place.round, c.place.round) == (1, 1)
    a.connect()
    assert a.reason is Reason.NODE_REMOVED


def test_a_later_attempt_leaves_the_round_and_an_older_one_is_refused(pair):
    a, b = pair.agents
    old = a.ask(session=pair.new_session())
    a.join(seen=False)
    assert (a.stands, b.waiting) == (WAITING, 1)
    refused = pair.refused(old)
    assert refused.refusal.reason is Reason.SUPERSEDED
    assert "attempt 1 of node a" in refused.refusal.message
    assert "it has made attempt 2 since" in refused.refusal.message
    pair.assert_told()


def test_the_end_of_the_stream_of_an_older_attempt_does_no_harm(pair):
    a, _ = pair.agents
    a.join(seen=False)
    a.coordinator_sees_it()
    pair.wait(2 * KEEP_ALIVE)
    assert a.stands is WAITING


def test_a_later_attempt_may_come_from_another_address(pair):
    a, b = pair.agents
    a.address = "z"
    a.join()
    b.join()
    pair.wait(LAST_CALL)
    (found,) = (node for node in pair.rendezvous if node.info.incarnation == a.incarnation)
    assert found.info == a.info


# ---------------------------------------------------------------------- leaving


def test_leaving_gives_the_place_up_at_once(full):
    _, b = full.agents
    c = full.agent("c")
    assert b.leave("scaled\ndown\x1b")
    assert c.stands is WAITING
    (gone,) = full.rendezvous.departed
    assert (gone.info, gone.reason) == (b.info, "left (scaled\ndown\\x1b)")
    assert not b.leave()


@pytest.mark.parametrize("run", [RUN, "another", "", "x" * 10_000])
def test_who_has_no_place_leaves_without_harm(full, run):
    event = LeaveRendezvous(full.new_session(), run, "stranger")
    assert full.ask(event) == [NodeLeft(had_place=False)]
    assert list(full.coordinator.runs) == [RUN]


def test_a_node_that_is_made_to_leave_is_told(full):
    _, b = full.agents
    answer = full.ask(LeaveRendezvous(full.new_session(), RUN, b.incarnation))
    assert answer == [NodeLeft(had_place=True)]
    assert (b.reason, b.session) == (Reason.NODE_REMOVED, None)


def test_only_the_last_that_went_are_remembered():
    world = RendezvousWorld(nodes(2))
    for number in range(MAX_DEPARTED + 3):
        world.agent(f"n{number}").leave()
    assert len(world.rendezvous.departed) == MAX_DEPARTED
    assert world.rendezvous.departed[0].info.address == f"n{MAX_DEPARTED + 2}"


# ---------------------------------------------------------------------- join timeouts


def test_a_join_that_takes_too_long_names_who_joined_and_who_went():
    world = RendezvousWorld(nodes(4))
    a = world.agent("a")
    world.wait(100)
    b = world.agent("b")
    world.agent("c").leave("bye")
    world.wait(JOIN - 100)
    assert (a.reason, b.reason) == (Reason.RENDEZVOUS_TIMED_OUT, None)
    first, gone, what_next = some(a.refusal).message.splitlines()
    assert first == (
        f"round 0 of run job1 did not come together within the join timeout of 600 s: "
        f"2 of 4 nodes had joined: a (pid {a.pid}), b (pid {b.pid})"
    )
    assert gone.startswith("  gone: c (pid ")
    assert gone.endswith(" of round 0, left (bye) 500 s ago")
    assert what_next == "  next: muster get rounds job1"


def test_all_whose_time_is_over_at_once_are_named_to_each_of_them():
    world = RendezvousWorld(nodes(4))
    agents = world.several("a", "b", "c")
    world.wait(JOIN)
    for agent in agents:
        assert agent.reason is Reason.RENDEZVOUS_TIMED_OUT
        assert "3 of 4 nodes had joined" in some(agent.refusal).message
        for other in agents:
            assert f"{other.address} (pid {other.pid})" in some(agent.refusal).message
        assert "gone" not in some(agent.refusal).message


def test_who_gave_up_is_named_to_the_next_who_does():
    world = RendezvousWorld(nodes(4))
    a = world.agent("a")
    world.wait(5)
    b = world.agent("b")
    world.wait(JOIN)
    assert f"gone: a (pid {a.pid}) of round 0, timed out 5 s ago" in some(b.refusal).message


def test_a_wait_to_be_let_in_takes_no_longer_than_the_join_timeout(pair):
    a, _ = pair.agents
    c = pair.agent("c")
    pair.wait(JOIN)
    assert c.reason is Reason.RENDEZVOUS_TIMED_OUT
    assert (
        "the 2 nodes of round 0 of run job1 let nobody in within the join timeout of 600 s; waiting: c"
        in c.refusal.message
    )
    assert a.waiting == 0


def test_a_node_in_a_round_has_no_join_timeout(pair):
    pair.wait(10 * JOIN)
    assert [one.reason for one in pair.agents] == [None, None]
    pair.assert_told()


def test_the_last_call_comes_before_the_join_timeout():
    world = RendezvousWorld(nodes(2, 3, join_timeout=30, last_call_timeout=30))
    a, b = world.several("a", "b")
    world.wait(30)
    assert world.ranks_of(a, b) == [0, 1]


def test_who_timed_out_may_join_anew():
    world = RendezvousWorld(nodes(2))
    a = world.agent("a")
    world.wait(JOIN)
    a.join()
    b = world.agent("b")
    assert world.ranks_of(a, b) == [0, 1]


# ---------------------------------------------------------------------- settings and bad input


def test_nodes_must_ask_for_the_same(full):
    odd = full.agent("c", nodes(2, 4))
    assert odd.reason is Reason.SETTINGS_DIFFER
    message = odd.refusal.message
    assert f"node c (pid {odd.pid}) asks for 2 to 4 nodes, and the nodes of run job1 for 2 nodes" in message
    assert "Start every node with the same --nnodes." in message
    full.assert_told()


def test_nodes_may_have_times_of_their_own():
    world = RendezvousWorld(nodes(2))
    world.agent("a")
    b = world.agent("b", nodes(2, join_timeout=1, last_call_timeout=1, keep_alive_timeout=1))
    assert b.rank == 1
    b.lose_stream()
    world.wait(1)
    assert world.rendezvous.count(PARTICIPANT) == 1


LONG = "x" * 10_240


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"settings": nodes(0, 1)}, "min_nodes"),
        ({"settings": nodes(-1, 1)}, "min_nodes"),
        ({"settings": nodes(3, 2)}, "max_nodes"),
        ({"settings": nodes(1, 65_537)}, "max_nodes"),
        ({"settings": nodes(70_000, 70_000)}, "min_nodes"),
        ({"settings": nodes(1, join_timeout=0)}, "join_timeout"),
        ({"settings": nodes(1, last_call_timeout=0)}, "last_call_timeout"),
        ({"settings": nodes(1, keep_alive_timeout=0)}, "keep_alive_timeout"),
        ({"settings": nodes(1, join_timeout=1e12)}, "join_timeout"),
        ({"attempt": 0}, "attempt"),
        ({"run_id": ""}, "run_id"),
        ({"run_id": LONG}, "run_id"),
        ({"run_id": "a\0b"}, "run_id"),
        ({"node": NodeInfo("", "a", 1)}, "incarnation"),
        ({"node": NodeInfo(LONG, "a", 1)}, "incarnation"),
        ({"node": NodeInfo("i", "", 1)}, "address"),
        ({"node": NodeInfo("i", LONG, 1)}, "address"),
        ({"node": NodeInfo("i", "a\x1b[2J", 1)}, "address"),
        ({"node": NodeInfo("i", "a", -1)}, "pid"),
    ],
)
def test_a_join_that_makes_no_sense_is_refused_and_names_the_field(changed, field):
    world = RendezvousWorld(nodes(1))
    agent = world.agent("a", join=False)
    agent.attempt = 1
    refused = world.refused(agent.ask(session=world.new_session(), **changed))
    assert refused.refusal.reason is Reason.INVALID_ARGUMENT
    assert refused.refusal.metadata == {"field": field}
    assert len(refused.refusal.message) < 300
    assert not world.coordinator.runs
    assert not world.disk.kept


def test_a_join_with_a_round_of_a_run_that_is_not_known_makes_no_run():
    world = RendezvousWorld(nodes(1))
    agent = world.agent("a", join=False)
    agent.attempt = 1
    refused = world.refused(agent.ask(session=world.new_session(), round=3))
    assert refused.refusal.reason is Reason.NODE_REMOVED
    assert not world.coordinator.runs
    assert not world.disk.kept


@pytest.mark.parametrize(
    ("event", "field"),
    [
        (CloseRun(99, RUN, "", ""), "by"),
        (CloseRun(99, RUN, LONG, ""), "by"),
        (CloseRun(99, RUN, "me", "x" * 20_000), "reason"),
        (Evict(99, RUN, 0, "x" * 20_000), "reason"),
    ],
)
def test_a_close_or_an_eviction_that_makes_no_sense_is_refused(full, event, field):
    refused = full.refused(event)
    assert refused.refusal.reason is Reason.INVALID_ARGUMENT
    assert refused.refusal.metadata == {"field": field}


@pytest.mark.parametrize("event", [CloseRun(99, LONG, "me", ""), Evict(99, LONG, 0, "")])
def test_a_run_that_nobody_knows_cannot_be_closed_or_lose_a_rank(full, event):
    refused = full.refused(event)
    assert refused.refusal.reason is Reason.RUN_NOT_FOUND
    assert len(refused.refusal.message) < 300


def test_limits_not_luck_too_many_streams_of_nodes():
    world = RendezvousWorld(nodes(3), limits=Limits(max_sessions=2))
    a, _ = world.several("a", "b")
    c = world.agent("c")
    assert some(c.refusal).metadata == {"limit": "max_sessions", "value": "2"}
    a.connect()
    assert a.stands is PARTICIPANT
    a.leave()
    assert world.agent("c").stands is PARTICIPANT


def test_limits_not_luck_too_many_runs_of_nodes():
    world = RendezvousWorld(nodes(2), limits=Limits(max_runs=1))
    world.agent("a")
    refused = world.agent("b", run="job2")
    assert some(refused.refusal).metadata == {"limit": "max_runs", "value": "1"}
    assert list(world.coordinator.runs) == [RUN]


def test_limits_not_luck_too_many_nodes_that_have_a_place():
    world = RendezvousWorld(nodes(3), limits=Limits(max_sessions=3))
    for address in "ab":
        world.agent(address).lose_stream()
    c = world.agent("c")
    d = world.agent("d")
    assert some(d.refusal).metadata == {"limit": "max_sessions", "value": "3"}
    assert "3 nodes have a place" in some(d.refusal).message
    c.join()
    world.wait(KEEP_ALIVE)
    assert world.agent("d").stands is PARTICIPANT


# ---------------------------------------------------------------------- restarts of the coordinator


def test_a_complete_round_survives_a_restart(pair):
    a, b = pair.agents
    pair.crash()
    for agent in (b, a):
        agent.connect()
    assert a.rounds == [RoundComplete(0, 0, 2)]
    assert b.rounds == [RoundComplete(0, 1, 2)]
    pair.assert_told()
    c = pair.agent("c")
    a.join()
    b.join()
    assert pair.ranks_of(a, b, c) == [0, 1, 2]
    assert c.place.round == 1


def test_after_a_restart_the_nodes_of_a_round_have_their_keep_alive_to_come_back(pair):
    a, b = pair.agents
    pair.crash()
    pair.wait(KEEP_ALIVE - 1)
    a.connect()
    pair.wait(2)
    assert a.rank == 0
    b.connect()
    assert b.reason is Reason.NODE_REMOVED


def test_joins_that_wait_are_made_again_after_a_restart():
    world = RendezvousWorld(nodes(2))
    a = world.agent("a")
    world.crash()
    b = world.agent("b")
    assert b.stands is PARTICIPANT
    a.connect()
    assert world.ranks_of(a, b) == [0, 1]


@pytest.mark.parametrize("crash", Crash)
def test_a_round_that_nobody_heard_of_is_told_after_a_restart_or_never_was(crash):
    world = RendezvousWorld(nodes(2))
    a = world.agent("a")
    world.crash_next = crash
    b = world.agent("b")
    assert world.ranks_of(a, b) == [None, None]
    assert len(world.completed) == (crash is Crash.AFTER_PERSIST)
    b.connect()
    a.connect()
    assert world.ranks_of(a, b) == [0, 1]
    assert [one.round for one in world.completed] == [0]


@pytest.mark.parametrize("crash", Crash)
def test_who_left_a_round_is_not_in_it_after_a_restart(pair, crash):
    a, b = pair.agents
    pair.crash_next = crash
    a.join()
    a.connect()
    b.connect()
    assert (a.stands, b.rank) == (WAITING, 1)
    pair.assert_told()


def test_rounds_are_never_numbered_twice_over_restarts():
    world = RendezvousWorld(nodes(1))
    a = world.agent("a")
    for number in range(1, 6):
        if number % 2:
            a.leave()
        world.crash()
        a.join()
        assert some(a.place).round == number
    assert [one.round for one in world.completed] == [0, 1, 2, 3, 4, 5]


def test_a_round_that_only_came_together_before_a_restart_has_its_number_after_it(pair):
    a, b = pair.agents
    a.leave()
    b.join()
    assert (b.stands, b.standing.round) == (PARTICIPANT, 1)
    pair.crash()
    b.connect()
    assert (b.stands, b.standing.round) == (PARTICIPANT, 1)
    c = pair.agent("c")
    pair.wait(LAST_CALL)
    assert (b.place.round, c.place.round) == (1, 1)


def test_only_the_last_rounds_are_kept():
    world = RendezvousWorld(nodes(1))
    a = world.agent("a")
    forgotten = []
    for _ in range(ROUND_HISTORY + 2):
        a.join()
        forgotten += [one for one in world.last.records if isinstance(one, ForgetRound)]
    assert [one.round for one in forgotten] == [0, 1, 2]
    kept = [one.round for one in world.rendezvous.rounds]
    assert kept == list(range(3, ROUND_HISTORY + 3))
    world.crash()
    assert [one.round for one in world.rendezvous.rounds] == kept


# ---------------------------------------------------------------------- runs, and time


def test_runs_do_not_see_each_other():
    world = RendezvousWorld(nodes(2))
    a = world.agent("a")
    other = world.agent("b", run="job2")
    assert (a.stands, other.stands) == (PARTICIPANT, PARTICIPANT)
    assert not world.completed


def test_a_tick_that_comes_early_or_twice_does_no_harm(pair):
    before = pair.disk.records()
    for _ in range(3):
        effects = pair.do(Tick())
        assert [effects.records, effects.deliveries, effects.notices] == [[], [], []]
    assert pair.disk.records() == before


def test_an_idle_rendezvous_does_not_ask_to_be_woken_again_and_again():
    """A last call that is over, with a node that is lost, leaves nothing to do but to wait for the node."""
    world = RendezvousWorld(nodes(2, 3, keep_alive_timeout=100))
    _, b = world.several("a", "b")
    b.lose_stream()
    world.wait(LAST_CALL + 1)
    deadline = world.coordinator.next_deadline()
    assert deadline is not None
    assert deadline > world.now + 1


def test_what_happens_is_noticed(pair):
    a, b = pair.agents
    notices = []
    b.lose_stream()
    notices += pair.do(LeaveRendezvous(pair.new_session(), RUN, b.incarnation, "bye")).notices
    a.join()
    b.join()
    pair.now += LAST_CALL
    notices += pair.do(Tick()).notices
    assert [(one.event, one.run_id) for one in notices] == [("node.gone", RUN), ("round.completed", RUN)]
    assert notices[0].message == f"node b (pid {b.pid}) of round 0: left (bye)"
    names = f"a (pid {a.pid}), b (pid {b.pid})"
    assert notices[1].message == f"round 1 of run job1 was completed in 30 s: {names}"


# ---------------------------------------------------------------------- beside barriers


def test_the_first_round_is_numbered_above_the_generation_that_has_been():
    """Else its workers, whose generation the round is, would be refused as those of a past life."""
    world = RendezvousWorld(nodes(1))
    old = world.start(0, generation=3)
    old.join()
    old.goodbye()
    world.agent("a")
    assert world.rendezvous.round == 4
    world.crash()
    assert world.rendezvous.round == 4
    worker = world.start(0, generation=world.rendezvous.round)
    worker.join()
    assert worker.seats[CKPT].refused is None


def test_the_first_round_of_a_job_without_a_past_is_0():
    world = RendezvousWorld(nodes(1))
    world.agent("a")
    assert world.rendezvous.round == 0


def test_a_later_round_too_is_numbered_above_the_generation_that_has_been():
    """The job may have run under another rendezvous backend for a while."""
    world = RendezvousWorld(nodes(1))
    a = world.agent("a")
    elsewhere = world.start(0, generation=3)
    elsewhere.join()
    elsewhere.goodbye()
    a.leave()
    world.agent("b")
    assert world.rendezvous.round == 4


@pytest.mark.parametrize("restarts", [False, True])
def test_nodes_that_are_away_bind_the_settings_until_their_places_are_given_up(restarts):
    world = RendezvousWorld(nodes(2))
    agents = world.several("a", "b")
    for agent in agents:
        agent.lose_stream()
    if restarts:
        world.crash()
    stray = world.agent("c", settings=nodes(1))
    assert stray.reason is Reason.SETTINGS_DIFFER
    assert "are lost at present; their places are given up 15 s after that" in some(stray.refusal).message
    for agent in agents:
        agent.connect()
    for agent in agents:
        agent.join()
    assert world.ranks_of(*agents) == [0, 1]
    assert [agent.reason for agent in agents] == [None, None]


def test_lost_nodes_bind_no_settings_after_their_keep_alive_timeout():
    world = RendezvousWorld(nodes(2))
    for agent in world.several("a", "b"):
        agent.lose_stream()
    world.wait(KEEP_ALIVE)
    c = world.agent("c", settings=nodes(1))
    assert c.place == RoundComplete(1, 0, 1)


def test_round_that_forms_keeps_its_settings_while_all_nodes_are_away():
    world = RendezvousWorld(nodes(4))
    agents = world.several("a", "b", "c")
    for agent in agents:
        agent.lose_stream()
    stray = world.agent("x", settings=nodes(2))
    assert stray.reason is Reason.SETTINGS_DIFFER
    for agent in agents:
        agent.connect()
    agents.append(world.agent("d"))
    assert world.ranks_of(*agents) == [0, 1, 2, 3]


def test_those_who_time_out_a_moment_apart_are_one_company():
    world = RendezvousWorld(nodes(3))
    world.agent("a")
    world.wait(0.01)
    b = world.agent("b")
    world.wait(JOIN)
    assert "2 of 3 nodes had joined: b" in some(b.refusal).message
    assert "gone" not in some(b.refusal).message
