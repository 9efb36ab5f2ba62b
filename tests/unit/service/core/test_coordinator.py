"""Sessions, and what comes in badly: it is refused, and nothing else is disturbed by it."""

import math

import pytest

from muster.service.core.coordinator import Coordinator
from muster.service.core.sessions import EPOCH_SHIFT
from muster.service.core.vocabulary.effects import Effects, Refused, Welcome
from muster.service.core.vocabulary.events import (
    Arrival,
    Arrive,
    Disconnected,
    Goodbye,
    Hello,
    JoinGroup,
    ProcessInfo,
    Tick,
)
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import Decision, Instant, MemberState, Outcome
from muster.service.core.vocabulary.refusal import Reason
from tests.support.expect import of_kind, some
from tests.support.world.core_client import CKPT, TIMEOUT
from tests.support.world.core_world import RUN, TTL, World

LONG = "x" * 10_240
INFO = ProcessInfo(1, "p-new", "node-9", 99)


@pytest.fixture
def world():
    """Three ranks that have joined; rank 0 waits. At the end its barrier still completes."""
    world = World(3, limits=Limits(max_world_size=1024))
    zero, one, two = world.ranks()
    zero.arrive()
    yield world
    one.arrive()
    two.arrive()
    assert [client.outcomes for client in (zero, one, two)] == [[Outcome.RELEASED]] * 3
    world.assert_good()


def assert_refused(world, event, reason, *words):
    refused = world.refused(event)
    assert refused.refusal.reason is reason
    for word in words:
        assert word in refused.refusal.message
    assert world.last.records == []
    assert len(world.last.deliveries) == 1
    return refused


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"rank": -1}, ["rank = -1", "from 0 to 1023"]),
        ({"rank": 1024}, ["rank = 1024", "from 0 to 1023"]),
        ({"incarnation": ""}, ["incarnation", "must not be empty"]),
        ({"incarnation": LONG}, ["incarnation", "10,240 bytes", "256"]),
        ({"incarnation": "a\x1b[31m"}, ["incarnation", "\\x1b", "control characters"]),
        ({"host": ""}, ["host", "must not be empty"]),
        ({"host": LONG}, ["host", "10,240 bytes"]),
        ({"host": "node\n"}, ["host", "control characters"]),
        ({"host": "\ud800"}, ["host", "control characters"]),
        ({"pid": -5}, ["pid = -5", "not negative"]),
    ],
)
def test_bad_process_in_a_hello_is_refused(world, info, words):
    event = Hello(world.new_session(), RUN, 0, (INFO._replace(**info),))
    refused = assert_refused(world, event, Reason.INVALID_ARGUMENT, *words)
    assert refused.final
    assert refused.refusal.metadata == {"field": next(iter(info))}


@pytest.mark.parametrize(
    ("run_id", "words"),
    [
        ("", ["run_id", "must not be empty"]),
        (LONG, ["run_id", "10,240 bytes"]),
        ("ä" * 129, ["run_id", "258 bytes"]),
        ("job\x00", ["run_id", "\\x00", "control characters"]),
    ],
)
def test_bad_run_id_is_refused(world, run_id, words):
    event = Hello(world.new_session(), run_id, 0, (INFO,))
    assert_refused(world, event, Reason.INVALID_ARGUMENT, *words)
    assert list(world.coordinator.runs) == [RUN]


def test_hello_without_processes_is_refused(world):
    event = Hello(world.new_session(), RUN, 0, ())
    assert_refused(world, event, Reason.INVALID_ARGUMENT, "names at least one process")


def test_hello_with_duplicate_ranks_is_refused(world):
    event = Hello(world.new_session(), RUN, 0, (INFO, INFO._replace(incarnation="other")))
    assert_refused(world, event, Reason.INVALID_ARGUMENT, "processes = 1", "only once")


def test_bad_hello_of_a_new_generation_does_not_end_the_old(world):
    event = Hello(world.new_session(), RUN, 7, (INFO._replace(pid=-1),))
    assert_refused(world, event, Reason.INVALID_ARGUMENT)
    assert world.coordinator.runs[RUN].generation == 0


def test_second_hello_on_one_session_is_refused(world):
    event = Hello(world.clients[1].session, RUN, 0, (INFO,))
    refused = world.refused(event)
    assert refused.refusal.reason is Reason.HELLO_REPEATED
    world.clients[1].connect()


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("", ["prefix", "must not be empty"]),
        (LONG, ["prefix", "10,240 bytes"]),
        ("ckpt\x07", ["prefix", "\\x07", "control characters"]),
    ],
)
def test_bad_prefix_is_refused(world, prefix, words):
    event = JoinGroup(world.clients[1].session, prefix, 3)
    assert_refused(world, event, Reason.INVALID_ARGUMENT, *words)


@pytest.mark.parametrize(
    ("world_size", "participants", "words"),
    [
        (0, (), ["world_size = 0", "from 1 to 1024"]),
        (-1, (), ["world_size = -1"]),
        (1025, (), ["world_size = 1025"]),
        (3, (0, 1, 1), ["participants = [0, 1, 1]", "only once"]),
        (3, (0, 1, 3), ["participants = [3]", "from 0 to 2"]),
        (3, (-1, 1), ["participants = [-1]"]),
    ],
)
def test_bad_shape_is_refused(world, world_size, participants, words):
    event = JoinGroup(world.clients[1].session, "eval", world_size, participants)
    assert_refused(world, event, Reason.INVALID_ARGUMENT, *words)
    assert list(world.coordinator.runs[RUN].groups) == [CKPT]


def test_rank_outside_of_the_world_cannot_join(world):
    event = JoinGroup(world.clients[2].session, "eval", 2)
    assert_refused(world, event, Reason.NOT_A_PARTICIPANT, "world size 2 does not include rank 2")
    assert list(world.coordinator.runs[RUN].groups) == [CKPT]


def test_session_cannot_join_for_a_rank_that_it_did_not_say_hello_for(world):
    event = JoinGroup(world.clients[1].session, CKPT, 3, ranks=(0,))
    assert_refused(world, event, Reason.RANK_NOT_IN_SESSION, "rank 0 is not one of", "said hello for: 1")


@pytest.mark.parametrize("timeout", [0, -1.0, math.nan, math.inf, -math.inf, 31 * 86_400.0])
def test_bad_timeout_is_refused(world, timeout):
    event = Arrive(world.clients[1].session, CKPT, 0, timeout, (Arrival(1),))
    words = f"timeout = {timeout:g} s", "above 0 and at most"
    assert_refused(world, event, Reason.INVALID_ARGUMENT, *words)


def test_arrival_without_a_hello_is_refused(world):
    event = Arrive(world.new_session(), CKPT, 0, TIMEOUT, (Arrival(1),))
    assert_refused(world, event, Reason.HELLO_REQUIRED, "first message", "Hello")
    assert_refused(world, JoinGroup(world.new_session(), CKPT, 3), Reason.HELLO_REQUIRED)


def test_arrival_at_an_unknown_group_is_refused(world):
    event = Arrive(world.clients[1].session, "eval\x07", 0, TIMEOUT, (Arrival(1),))
    assert_refused(world, event, Reason.NOT_JOINED, '"eval\\x07"', "Send JoinGroup first")


def test_arrival_at_a_group_that_its_process_did_not_join_is_refused(world):
    mute = world.start(1)
    event = Arrive(mute.session, CKPT, 0, TIMEOUT, (Arrival(1),))
    # Its rank speaks through an older process, so it is no question of who is newer.
    assert world.refused(event).refusal.reason is Reason.NOT_JOINED


def test_arrival_for_a_rank_of_another_session_is_refused(world):
    event = Arrive(world.clients[1].session, CKPT, 0, TIMEOUT, (Arrival(2),))
    assert_refused(world, event, Reason.RANK_NOT_IN_SESSION, "rank 2")


def test_arrival_ahead_of_the_sequence_is_refused_with_a_next_step(world):
    event = Arrive(world.clients[1].session, CKPT, 1, TIMEOUT, (Arrival(1),))
    refused = assert_refused(world, event, Reason.SEQUENCE_AHEAD, "#1", "#0", "Start the run as a new")
    assert refused.refusal.metadata == {"next_sequence": "0"}
    assert (refused.prefix, refused.sequence, refused.final) == (CKPT, 1, False)


def test_arrival_behind_its_start_is_refused_and_says_where_it_starts():
    world = World(2)
    for client in world.ranks():
        client.arrive()
    restarted = world.start(1)
    restarted.join()
    event = Arrive(some(restarted.session), CKPT, 0, TIMEOUT, (Arrival(1),))
    refused = assert_refused(world, event, Reason.SEQUENCE_BEHIND, "it starts at #1", "JoinGroup")
    assert refused.refusal.metadata == {"start_sequence": "1"}


def test_something_that_is_no_event_is_a_fault_of_the_program():
    with pytest.raises(TypeError, match="not an event"):
        Coordinator().step("hello", Instant(0.0, 0.0), Effects())  # type: ignore[arg-type]


# ---------------------------------------------------------------------- sessions


def test_welcome_tells_the_ordinals_in_the_order_of_the_hello():
    world = World(2)
    infos = (ProcessInfo(1, "b", "h", 1), ProcessInfo(0, "a", "h", 2))
    (welcome,) = world.ask(Hello(world.new_session(), RUN, 0, infos))
    assert isinstance(welcome, Welcome)
    assert (welcome.epoch, welcome.session_ttl) == (1, TTL)
    assert welcome.max_payload_bytes == 1_048_576
    first, second = welcome.ordinals
    assert first < second


def test_incarnation_keeps_its_ordinal_when_it_connects_again():
    world = World(2)
    zero = world.start(0)
    ordinal = zero.ordinal
    world.start(0)
    zero.reconnect()
    assert zero.ordinal == ordinal


def test_ordinals_rise_over_restarts_of_the_coordinator():
    world = World(2)
    older = world.start(0)
    world.crash()
    newer = world.start(0)
    assert newer.ordinal > older.ordinal
    older.connect()
    assert older.ordinal < newer.ordinal


def test_reconnecting_process_ends_its_old_stream():
    world = World(2)
    zero, one = world.ranks()
    zero.arrive()
    old = some(zero.session)
    zero.stream_breaks()
    zero.connect()
    one.arrive()
    assert zero.outcomes == [Outcome.RELEASED]
    refused = world.refused(Arrive(old, CKPT, 1, TIMEOUT, (Arrival(0),)))
    assert refused.refusal.reason is Reason.SESSION_REPLACED
    world.do(Disconnected(old))
    world.wait(2 * TTL)
    assert some(world.coordinator.runs[RUN].roster.newest(0)).state is MemberState.CONNECTED


def test_replaced_stream_hears_the_reason():
    world = World(2)
    zero = world.start(0)
    world.do(Hello(world.new_session(), RUN, 0, (zero.info,)))
    assert zero.reason is Reason.SESSION_REPLACED
    assert "has opened another session" in zero.refusals[-1].refusal.message


def test_end_of_an_unknown_session_means_nothing():
    world = World(2)
    world.do(Disconnected(77), Goodbye(78), Tick())
    assert world.last == Effects()


def test_after_a_goodbye_the_session_is_over():
    world = World(2)
    zero, _ = world.ranks()
    session = some(zero.session)
    zero.goodbye()
    refused = world.refused(Arrive(session, CKPT, 0, TIMEOUT, (Arrival(0),)))
    assert refused.refusal.reason is Reason.HELLO_REQUIRED


def test_goodbye_reason_is_logged_without_control_characters():
    world = World(2)
    zero, _ = world.ranks()
    effects = world.do(Goodbye(some(zero.session), "node\x1b[2J is drained"))
    assert [notice.message.partition("left: ")[2] for notice in effects.notices] == [
        "node\\x1b[2J is drained"
    ]


def test_refusal_in_a_batch_affects_no_other_step():
    world = World(2)
    zero, one = world.ranks()
    world.streams.clear()  # nobody listens: it is the effects that are looked at
    effects = world.do(
        Arrive(some(zero.session), CKPT, 0, TIMEOUT, (Arrival(0),)),
        Arrive(some(zero.session), CKPT, 0, -1, (Arrival(0),)),
        Arrive(some(one.session), CKPT, 0, TIMEOUT, (Arrival(1),)),
        Arrive(some(one.session), CKPT, 0, TIMEOUT, (Arrival(1),)),
    )
    first, second, third = (message for _, message in effects.deliveries)
    assert isinstance(first, Refused)
    assert second is third is effects.decisions[0]
    assert effects.records == effects.decisions


def test_ordinal_of_a_later_epoch_is_replaced(world):
    """A coordinator whose state this one does not have gave it; nobody may use up the ordinals."""
    session = world.new_session()
    (delivery,) = world.do(Hello(session, RUN, 0, (INFO._replace(ordinal=99 << EPOCH_SHIFT),))).deliveries
    (ordinal,) = delivery.message.ordinals
    assert ordinal >> EPOCH_SHIFT == 1


def test_call_with_a_refused_join_has_not_arrived():
    world = World(2)
    one, two = world.call(0), world.call(1)
    world.hang_up(one)
    world.hang_up(two)
    assert world.group().next_sequence == 1
    again = world.arrive_once(0, world_size=3)
    assert world.refused(again).refusal.reason is Reason.SHAPE_CHANGED
    assert world.group().open is None
    assert again.session not in world.coordinator.sessions.open


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"generation": 2**40}, Reason.INVALID_ARGUMENT),
        ({"process": INFO._replace(host="")}, Reason.INVALID_ARGUMENT),
        ({"prefix": ""}, Reason.INVALID_ARGUMENT),
        ({"world_size": 0}, Reason.INVALID_ARGUMENT),
        ({"participants": (0, 9)}, Reason.INVALID_ARGUMENT),
        ({"participants": (1,)}, Reason.NOT_A_PARTICIPANT),
        ({"timeout": 0.0}, Reason.INVALID_ARGUMENT),
        ({"sequence": 1}, Reason.SEQUENCE_AHEAD),
        ({"arrival": Arrival(0, bytes(9))}, Reason.LIMIT_EXCEEDED),
    ],
)
def test_call_that_is_refused_begins_nothing(changes, reason):
    world = World(2, limits=Limits(max_payload_bytes=8))
    assert world.refused(world.arrive_once(0, **changes)).refusal.reason is reason
    assert world.last.records == []
    assert not world.coordinator.runs
    assert not world.coordinator.sessions
    # Nor does it begin a group in a run that is there.
    world.ranks(prefix="other")
    if "generation" not in changes:
        world.refused(world.arrive_once(0, **changes))
        assert world.last.records == []
        assert world.coordinator.runs[RUN].groups.keys() == {"other"}


def test_late_call_hears_the_failure_that_it_missed():
    """Though everyone else has gone meanwhile, and it begins nothing."""
    world = World(2)
    world.hang_up(world.call(0))
    world.wait(TIMEOUT + TTL)
    (decision,) = world.ask(world.arrive_once(1, sequence=0))
    assert isinstance(decision, Decision)
    assert (decision.sequence, decision.outcome) == (0, Outcome.TIMED_OUT)
    assert world.last.records == []
    (decision,) = world.ask(world.arrive_once(1, sequence=0))
    assert of_kind(Decision, decision).outcome is Outcome.TIMED_OUT
