"""The processes of a stream: a relay's stream gains, loses and regains processes, each judged alone."""

import pytest

from muster.service.core import views
from muster.service.core.retention.retention import Retention
from muster.service.core.vocabulary.effects import (
    Entry,
    Evicted,
    GroupJoined,
    ProcessesAdded,
    ProcessesRemoved,
    Refused,
    RunForgotten,
    Welcome,
)
from muster.service.core.vocabulary.events import (
    AddProcesses,
    Arrival,
    Arrive,
    CloseRun,
    Disconnected,
    Evict,
    Forget,
    Goodbye,
    Hello,
    JoinGroup,
    RemoveProcesses,
)
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import Closed, Decision, MemberState, MissingState, Outcome
from muster.service.core.vocabulary.refusal import Reason
from tests.support.expect import of_kind, some
from tests.support.world.core_client import CKPT, TIMEOUT
from tests.support.world.core_world import RUN, TTL, World
from tests.support.world.relay_node import RELAY, Node, info


@pytest.fixture
def world() -> World:
    return World(4)


# ---------------------------------------------------------------------- a relay's hello


def test_relay_is_welcomed_and_begins_no_run(world: World):
    node = Node(world)
    assert of_kind(Welcome, node.welcome).ordinals == ()
    assert (world.coordinator.runs, world.last.records) == ({}, [])


def test_relay_hello_admits_no_generation_and_does_not_count_as_use():
    world = World(2, retention=Retention(idle=100.0))
    client = world.start(0)
    client.goodbye()
    world.now += 60.0
    stream = Node(world, generation=7)
    assert world.coordinator.runs[RUN].generation == 0
    world.do(Goodbye(stream.session))
    world.wait(41.0)
    assert world.coordinator.runs == {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"processes": (info(0),)}, ["processes = 1 of them", "AddProcesses names them"]),
        ({"relay": "x" * 300}, ["relay", "300 bytes"]),
        ({"relay": "a\nb"}, ["relay", "control characters"]),
        ({"run_id": ""}, ["run_id", "must not be empty"]),
        ({"generation": 2**31}, ["generation"]),
    ],
)
def test_bad_hello_of_a_relay_is_refused(world: World, changes: dict[str, object], words: list[str]):
    said = {"run_id": RUN, "generation": 0, "processes": (), "relay": RELAY} | changes
    refused = world.refused(Hello(world.new_session(), **said))  # type: ignore[arg-type]
    assert (refused.refusal.reason, refused.final) == (Reason.INVALID_ARGUMENT, True)
    assert all(word in refused.refusal.message for word in words)
    assert len(world.coordinator.sessions) == 0


def test_second_hello_on_a_relay_stream_is_refused(world: World):
    node = Node(world)
    assert world.refused(Hello(node.session, RUN, 0, (), RELAY)).refusal.reason is Reason.HELLO_REPEATED


def test_relay_stream_counts_as_one_session():
    world = World(8, limits=Limits(max_sessions=2))
    Node(world, *range(6))
    Node(world, 6, 7)
    refused = world.refused(Hello(world.new_session(), RUN, 0, (), RELAY))
    assert refused.refusal.metadata["limit"] == "max_sessions"


# ---------------------------------------------------------------------- adding processes


def test_each_added_process_is_checked_alone_and_answered_in_order(world: World):
    node = Node(world)
    entries = node.add_processes(info(2), info(-1), info(0), info(1, "bad\n"), info(3))
    assert [entry.refusal and entry.refusal.metadata["field"] for entry in entries] == [
        None,
        "rank",
        None,
        "incarnation",
        None,
    ]
    assert [entry.ordinal > 0 for entry in entries] == [True, False, True, False, True]
    assert entries[0].ordinal < entries[2].ordinal < entries[4].ordinal
    assert node.ranks == [2, 0, 3]


def test_empty_add_processes_is_answered(world: World):
    node = Node(world)
    assert node.add_processes() == ()
    assert (world.coordinator.runs, world.last.records) == ({}, [])


def test_rank_named_twice_in_one_add_processes_is_refused(world: World):
    node = Node(world)
    assert node.refused(info(0), info(0), info(0, "other")) == [None, *[Reason.INVALID_ARGUMENT] * 2]
    assert node.ranks == [0]


def test_process_added_again_is_the_same_one(world: World):
    node = Node(world, 0, 1)
    first = world.coordinator.sessions.open[node.session].processes[0]
    (entry,) = node.add_processes(info(0, ordinal=first.ordinal))
    assert entry == Entry(first.ordinal)
    assert [message for message, _ in node.messages] == [ProcessesAdded((entry,))], (
        "it is not told that it was replaced"
    )
    assert world.coordinator.sessions.open[node.session].processes[0] is first
    node.arrive(0, 1)
    node.add_processes(info(0))
    node.arrive(0)
    assert sorted(some(world.group().open).arrivals) == [0, 1]


def test_second_process_of_a_rank_is_refused_until_the_first_is_removed(world: World):
    node = Node(world, 0, 1)
    (entry,) = node.add_processes(info(0, "younger"))
    refusal = some(entry.refusal)
    assert (refusal.reason, entry.ordinal) == (Reason.INVALID_ARGUMENT, 0)
    assert "rank 0 (node-0, pid 4000) speaks for it on this stream. Remove it first" in refusal.message
    node.remove_processes(0)
    assert node.refused(info(0, "younger")) == [None]
    world.evict(0)
    assert node.refused(info(0, "youngest")) == [None]
    assert node.ranks == [1, 0]


def test_another_stream_may_speak_for_the_same_rank(world: World):
    Node(world, 0)
    assert Node(world).refused(info(0, "younger")) == [None]


@pytest.mark.parametrize("kind", [AddProcesses, RemoveProcesses])
def test_relay_message_on_a_stream_without_a_relay_is_refused(
    world: World, kind: type[AddProcesses] | type[RemoveProcesses]
):
    client = world.start(0)
    said = (
        AddProcesses(some(client.session), (info(1),))
        if kind is AddProcesses
        else RemoveProcesses(some(client.session), (0,))
    )
    refused = world.refused(said)
    assert (refused.refusal.reason, refused.final) == (Reason.INVALID_ARGUMENT, False)
    assert "Open a session with Hello.relay" in refused.refusal.message
    assert world.refused(kind(world.new_session(), ())).refusal.reason is Reason.HELLO_REQUIRED
    assert client.session is not None


def test_processes_of_a_stale_relay_stream_are_refused(world: World):
    old = Node(world, 0, 1, generation=1)
    Node(world, 0, generation=2)
    assert old.refused(info(0), info(2)) == [Reason.STALE_GENERATION] * 2
    old.arrive(1)
    (refused,) = (of_kind(Refused, message) for message, _ in old.messages)
    assert (refused.refusal.reason, refused.rank) == (Reason.STALE_GENERATION, 1)
    old.remove_processes(0, 1)
    assert world.coordinator.sessions.relayed == 1


def test_first_process_of_a_newer_generation_begins_it(world: World):
    Node(world, 0, 1).arrive(0)
    node = Node(world, generation=3)
    assert world.coordinator.runs[RUN].generation == 0
    node.add_processes(info(0, "next"))
    assert world.coordinator.runs[RUN].generation == 3
    (decision,) = world.last.decisions
    assert decision.outcome is Outcome.ABORTED


def test_refused_add_processes_creates_no_run():
    world = World(2, limits=Limits(max_runs=1))
    world.start(0, run="other")
    node = Node(world)
    assert node.refused(info(0), info(1)) == [Reason.LIMIT_EXCEEDED] * 2
    assert node.refused(info(-1)) == [Reason.INVALID_ARGUMENT]
    assert list(world.coordinator.runs) == ["other"]


def test_evicted_process_is_refused_and_its_neighbours_are_not(world: World):
    node = Node(world, 0, 1)
    world.evict(0)
    assert node.refused(info(0), info(1), info(2)) == [Reason.EVICTED, None, None]


def test_closed_run_is_announced_to_known_ranks_and_refuses_new_ones(world: World):
    node = Node(world, 0, 1)
    closed = CloseRun(world.new_session(), RUN, "ann@desk", "done")
    world.do(closed)
    ((message, ranks),) = node.messages
    assert (of_kind(Closed, message).by, ranks) == ("ann@desk", [0, 1])
    assert node.refused(info(1), info(3)) == [None, Reason.RUN_CLOSED]
    assert node.messages[1:] == [(message, [1])]
    assert Node(world).refused(info(3)) == [Reason.RUN_CLOSED]
    assert len(world.last.deliveries) == 1, "no process was added, so none is notified"


def test_processes_that_speak_through_relays_are_bounded():
    world = World(8, limits=Limits(max_relayed_processes=3))
    first, second = Node(world, 0, 1), Node(world, 2)
    (entry,) = second.add_processes(info(3))
    refusal = some(entry.refusal)
    assert (refusal.reason, refusal.metadata) == (
        Reason.LIMIT_EXCEEDED,
        {"limit": "max_relayed_processes", "value": "3"},
    )
    assert "3 processes speak through relays" in refusal.message
    assert second.refused(info(0), info(2)) == [None, None], "one that is counted already may move"
    assert (first.ranks, second.ranks) == ([1], [2, 0])
    first.remove_processes(1)
    assert second.refused(info(3)) == [None]
    world.do(Disconnected(second.session))
    used = {view.limit: view.used for view in views.usage(world.coordinator, world.instant)}
    assert (used["max_relayed_processes"], used["max_sessions"]) == (0, 1)


# ---------------------------------------------------------------------- removing processes


def test_goodbye_of_one_rank_fails_only_barriers_that_need_it(world: World):
    node, other = Node(world, 0, 1, 2), Node(world, 3)
    node.arrive(0)
    node.remove_processes(2, 1, goodbye="done")
    (decision,) = world.last.decisions
    assert decision.outcome is Outcome.MEMBER_LOST
    assert [(one.rank, one.state) for one in decision.missing if one.state is MissingState.LEFT] == [
        (1, MissingState.LEFT),
        (2, MissingState.LEFT),
    ], "both are known before the barrier fails"
    assert node.messages == [(decision, [0]), (ProcessesRemoved((2, 1)), [])]
    assert other.messages == []
    assert (node.ranks, [node.state(rank) for rank in range(4)]) == (
        [0],
        [MemberState.CONNECTED, MemberState.LEFT, MemberState.LEFT, MemberState.CONNECTED],
    )


def test_process_that_loses_its_relay_connection_has_the_session_ttl_to_return(world: World):
    node = Node(world, 0, 1, 2, 3)
    node.arrive(0, 1, 2)
    node.remove_processes(3)
    assert world.last.decisions == []
    assert node.state(3) is MemberState.DISCONNECTED
    world.wait(TTL - 0.1)
    assert world.group().open is not None
    world.wait(0.2)
    ((decision, ranks),) = node.messages
    assert (of_kind(Decision, decision).outcome, ranks) == (Outcome.MEMBER_LOST, [0, 1, 2])


def test_process_that_returns_within_the_ttl_loses_nothing(world: World):
    node = Node(world, 0, 1, 2, 3)
    node.arrive(0, 1, 2)
    node.remove_processes(3)
    world.wait(TTL - 0.1)
    node.add_processes(info(3))
    world.wait(1.0)
    node.arrive(3)
    ((decision, ranks),) = node.messages
    assert (of_kind(Decision, decision).outcome, ranks) == (Outcome.RELEASED, [0, 1, 2, 3])


def test_remove_processes_ignores_ranks_of_other_streams(world: World):
    node, other = Node(world, 0), Node(world, 1)
    node.remove_processes(1, 5, -7, goodbye="done")
    node.remove_processes()
    node.remove_processes(0, 0)
    assert (other.state(1), node.ranks) == (MemberState.CONNECTED, [])


def test_moved_process_is_not_removed_by_its_old_relay(world: World):
    node, other = Node(world, 0, 1), Node(world)
    other.add_processes(info(0))
    node.remove_processes(0, goodbye="done")
    assert (other.ranks, other.state(0)) == ([0], MemberState.CONNECTED)


def test_goodbye_of_a_relay_covers_all_its_processes(world: World):
    node = Node(world, 0, 1, 2)
    node.remove_processes(1)
    world.do(Goodbye(node.session, "the node is done"))
    assert [node.state(rank) for rank in range(3)] == [
        MemberState.LEFT,
        MemberState.DISCONNECTED,
        MemberState.LEFT,
    ]
    assert len(world.coordinator.sessions) == world.coordinator.sessions.relayed == 0


def test_processes_of_a_broken_relay_stream_have_the_ttl_to_return(world: World):
    node, other = Node(world, 0, 1, 2), Node(world)
    other.add_processes(info(2))
    world.do(Disconnected(node.session))
    assert [node.state(rank) for rank in range(3)] == [
        MemberState.DISCONNECTED,
        MemberState.DISCONNECTED,
        MemberState.CONNECTED,
    ]
    other.add_processes(info(1))
    world.wait(TTL + 1.0)
    assert [node.state(rank) for rank in range(3)] == [
        MemberState.LOST,
        MemberState.CONNECTED,
        MemberState.CONNECTED,
    ]


# ---------------------------------------------------------------------- single ranks, never the node


def test_eviction_sends_one_rank_away_even_if_it_is_the_only_one(world: World):
    node = Node(world, 0)
    assert world.ask(Evict(world.new_session(), RUN, 0, "bad disk")) == [Evicted()]
    ((message, _),) = node.messages
    refused = of_kind(Refused, message)
    assert (refused.refusal.reason, refused.prefix, refused.rank, refused.final) == (
        Reason.EVICTED,
        "",
        0,
        False,
    )
    assert node.ranks == []
    assert node.refused(info(1)) == [None]


@pytest.mark.parametrize("to", ["a relay", "a stream of its own", "a unary call"])
def test_process_that_opens_another_session_is_replaced_alone(world: World, to: str):
    node = Node(world, 0, 1)
    if to == "a relay":
        Node(world).add_processes(info(0))
    elif to == "a stream of its own":
        world.do(Hello(world.new_session(), RUN, 0, (info(0),)))
    else:
        world.do(world.arrive_once(0, process=info(0)))
    refused = of_kind(Refused, node.messages[0][0])
    assert (refused.refusal.reason, refused.prefix, refused.rank) == (Reason.SESSION_REPLACED, "", 0)
    assert not refused.final
    assert (node.ranks, world.coordinator.sessions.relayed) == ([1], 1 + (to == "a relay"))
    (process,) = world.coordinator.runs[RUN].roster.of_rank(0)
    assert process.relay == (RELAY if to == "a relay" else "")


def test_process_added_by_a_relay_ends_its_own_stream(world: World):
    client = world.start(0)
    Node(world).add_processes(client.info)
    assert (client.reason, client.session) == (Reason.SESSION_REPLACED, None)
    assert client.refusals[-1].final


def test_message_for_an_evicted_rank_does_not_affect_others(world: World):
    node, other = Node(world, 0, 1, 2, join=False), world.start(3)
    other.join()
    world.evict(1)
    world.start(1)
    world.do(JoinGroup(node.session, CKPT, 4, ranks=(0, 1, 2)))
    (refused,) = node.refusals
    assert (refused.refusal.reason, refused.prefix, refused.rank) == (Reason.RANK_NOT_IN_SESSION, CKPT, 1)
    assert node.messages[1:] == [(GroupJoined(CKPT, ((0, 0), (2, 0))), [])]
    node.arrive(0, 1, 2)
    (refused,) = node.refusals
    assert (refused.refusal.reason, refused.prefix, refused.rank) == (Reason.RANK_NOT_IN_SESSION, CKPT, 1)
    assert sorted(some(world.group().open).arrivals) == [0, 2]


def test_relay_message_that_names_a_rank_twice_is_refused(world: World):
    node = Node(world, 0, 1)
    node.arrive(1, 0, 1)
    assert [(one.refusal.reason, one.rank) for one in node.refusals] == [
        (Reason.INVALID_ARGUMENT, 1),
        (Reason.INVALID_ARGUMENT, 0),
    ]
    assert world.group().open is None


def test_message_without_a_group_evicts_no_rank(world: World):
    node = Node(world, 0)
    for event in (
        Arrive(node.session, "", 0, TIMEOUT, (Arrival(0),)),
        JoinGroup(node.session, "", 4, ranks=(0,)),
        JoinGroup(Node(world).session, CKPT, 4),
    ):
        refused = world.refused(event)
        assert (refused.refusal.reason, refused.rank) == (Reason.INVALID_ARGUMENT, None)
    assert node.ranks == [0]


def test_forgotten_run_ends_its_relay_streams_finally(world: World):
    node, empty = Node(world, 0), Node(world)
    assert world.ask(Forget(world.new_session(), RUN, True)) == [RunForgotten()]
    for stream in (node, empty):
        assert [one.final for one in stream.refusals] == [True]
    assert len(world.coordinator.sessions) == world.coordinator.sessions.relayed == 0


def test_relay_stream_outlives_an_unused_run_and_creates_it_again():
    world = World(2, retention=Retention(idle=100.0))
    node = Node(world, 0, 1, generation=1)
    newer = Node(world, 0, generation=2)
    newer.remove_processes(0, goodbye="done")
    world.wait(101.0)
    assert world.coordinator.runs == {}
    assert node.ranks == [0, 1], "they are of a generation that is over, and were not removed"
    assert node.refused(info(1, "again")) == [None]
    assert (node.ranks, world.coordinator.sessions.relayed) == ([1], 1)
