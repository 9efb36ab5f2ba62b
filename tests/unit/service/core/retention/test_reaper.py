"""An operator removes a run: nothing is left of it, nobody who used it hangs, and its id is free."""

import pytest

from muster.service.core.views import removal
from muster.service.core.vocabulary.effects import Effects, Refused, RunForgotten
from muster.service.core.vocabulary.events import CloseRun, Disconnected, Forget, Hello, StoreRequest, Tick
from muster.service.core.vocabulary.model import Outcome
from muster.service.core.vocabulary.operations import Check, Flag, Set, Wait
from muster.service.core.vocabulary.refusal import Reason
from tests.support.expect import some
from tests.support.world.core_client import CKPT
from tests.support.world.core_disk import Crash
from tests.support.world.core_world import RUN, TTL, World
from tests.support.world.rendezvous_world import RendezvousWorld, nodes


def forget(world: World, *, force: bool = False) -> object:
    """What the operator is answered."""
    (answer,) = world.ask(Forget(world.new_session(), RUN, force))
    return answer


def refused(world: World) -> str:
    """Why the run is not forgotten."""
    answer = forget(world)
    assert isinstance(answer, Refused)
    assert answer.refusal.reason is Reason.RUN_IN_USE
    assert RUN in world.coordinator.runs
    return answer.refusal.message


def assert_nothing_left(world: World) -> None:
    assert RUN not in world.coordinator.runs
    assert not world.disk.kept
    assert world.coordinator._timers._armed == {}
    assert world.coordinator.stored.bytes == 0
    assert not world.coordinator.sessions
    assert not world.coordinator.node_streams
    assert world.coordinator.reaper._reviews._armed == {}


def test_run_that_is_over_goes_with_everything_and_its_id_is_free():
    world = World(2)
    zero, one = world.ranks()
    zero.arrive()
    one.arrive()
    world.do(StoreRequest(world.new_session(), RUN, Set((("k", b"v"),))))
    zero.goodbye()
    one.goodbye()
    world.do(CloseRun(world.new_session(), RUN, "ann@desk", ""))
    assert forget(world) == RunForgotten()
    assert_nothing_left(world)
    assert world.last.forgotten == [RUN]
    (notice,) = world.last.notices
    assert (notice.event, notice.run_id) == ("run.forgotten", RUN)
    assert notice.message == "run job1 was forgotten: an operator asked for it (muster forget)"
    zero, one = world.ranks()
    zero.arrive()
    assert some(one.arrive()).sequence == 0
    assert world.ask(StoreRequest(world.new_session(), RUN, Check(("k",)))) == [Flag(False)]


def test_unknown_run_cannot_be_forgotten():
    world = World()
    answer = forget(world, force=True)
    assert isinstance(answer, Refused)
    assert answer.refusal.reason is Reason.RUN_NOT_FOUND


def test_it_is_refused_while_a_process_is_connected_or_may_come_back():
    world = World(2)
    zero, one = world.ranks()
    assert "run job1 is in use: 2 processes are connected to it, or may come back. End" in refused(world)
    one.goodbye()
    zero.lose_connection()
    assert "1 process is connected" in refused(world)
    world.wait(TTL)
    assert forget(world) == RunForgotten()


def test_forget_is_refused_while_a_node_call_or_barrier_waits():
    world = RendezvousWorld(nodes(1))
    node = world.agent("node-0")
    wait = world.new_session()
    world.do(StoreRequest(wait, RUN, Wait(("key",), 0)))
    assert "1 node has a place in its rendezvous; 1 call waits for its keys" in refused(world)
    node.leave()
    world.do(Disconnected(wait))
    call = world.call(0)
    assert "1 process is connected" in refused(world)
    world.hang_up(call)
    world.wait(2 * TTL)
    assert "a barrier with an arrival is open" in refused(world)


def test_by_force_every_stream_and_every_wait_ends_at_once():
    world = RendezvousWorld(nodes(2))
    world.world_size = 3
    in_time = world.agent("node-0")
    zero, one, two = world.ranks()
    zero.arrive()
    one.arrive()
    call, wait = world.call(2, prefix="eval"), world.new_session()
    world.do(StoreRequest(wait, RUN, Wait(("key",), 60)))
    who = {zero.session, one.session, two.session, in_time.session, call, wait}
    effects = world.do(Forget(world.new_session(), RUN, True))
    assert effects.deliveries.pop().message == RunForgotten()
    messages = {session: message for sessions, message in effects.deliveries for session in sessions}
    assert set(messages) == who
    for message in messages.values():
        assert isinstance(message, Refused)
        assert message.final
        assert message.refusal.reason is Reason.RUN_FORGOTTEN
    assert not effects.decisions
    assert zero.session is None
    assert zero.outcomes == []
    assert in_time.reason is Reason.RUN_FORGOTTEN
    assert_nothing_left(world)


def test_only_the_run_that_is_named_is_touched():
    world = RendezvousWorld(nodes(2))
    other, node = world.start(0, run="other"), world.agent("node-0", run="other")
    wait = world.new_session()
    world.do(StoreRequest(wait, "other", Wait(("key",), 60)))
    world.start(0)
    forget(world, force=True)
    assert other.session is not None
    assert node.refusal is None
    assert wait in world.coordinator.runs["other"].store.waiters
    world.do(StoreRequest(world.new_session(), "other", Set((("key", b""),))))
    assert not world.coordinator.runs["other"].store.waiters


def test_message_that_crosses_the_end_begins_nothing():
    """The coordinator hears it on a stream that it has ended."""
    world = World(2)
    zero, _ = world.ranks()
    session = some(zero.session)
    effects = Effects()
    world.coordinator.step(Forget(world.new_session(), RUN, True), world.instant, effects)
    zero.memberships[CKPT].waiting = True
    before = len(effects.records)
    zero._arrive(CKPT)
    world.do(Disconnected(session))
    world.do(Tick())
    assert len(effects.records) == before
    assert RUN not in world.coordinator.runs
    assert zero.refusals[-1].refusal.reason is Reason.HELLO_REQUIRED


def test_absent_process_of_a_forgotten_run_is_refused():
    """It comes back to a run id that was created again meanwhile."""
    world = World(2)
    zero, one = world.ranks()
    zero.arrive()
    one.arrive()
    zero.arrive()
    zero.stream_breaks()
    forget(world, force=True)
    world.coordinator_sees_it(zero)
    zero.connect()
    assert zero.reason is Reason.SEQUENCE_AHEAD
    assert "the run was forgotten" in zero.refusals[-1].refusal.message
    assert zero.outcomes == [Outcome.RELEASED]


@pytest.mark.parametrize("crash", list(Crash))
def test_forget_is_durable_before_it_is_delivered(crash: Crash):
    world = World(2)
    zero, _ = world.ranks()
    zero.arrive()
    world.crash_next = crash
    world.do(Forget(world.new_session(), RUN, True))
    assert not zero.refusals
    assert (RUN in world.coordinator.runs) == (crash is Crash.BEFORE_PERSIST)


def test_run_may_be_forgotten_and_begin_again_in_one_batch():
    world = World(1)
    old = world.start(0)
    old.join()
    old.arrive()
    new = world.start(0, connect=False)
    new.session = world.open_session(new)
    world.do(
        Forget(world.new_session(), RUN, True),
        Hello(new.session, RUN, 0, (new.info,)),
    )
    assert new.session is not None
    assert old.reason is Reason.RUN_FORGOTTEN
    assert new.join() == 0
    assert some(new.arrive()).outcome is Outcome.RELEASED
    world.crash()
    assert list(world.coordinator.runs) == [RUN]


def test_removal_view_counts_affected_processes_nodes_calls_and_barriers():
    world = RendezvousWorld(nodes(2))
    world.world_size = 2
    world.agent("node-0")
    zero, _ = world.ranks()
    zero.arrive()
    world.do(StoreRequest(world.new_session(), RUN, Wait(("key",), 60)))
    view = removal(world.coordinator, RUN, world.instant, force=True)
    assert (view.processes, view.nodes, view.waiting_calls) == (2, 1, 1)
    assert view.open_barriers == ((CKPT, 0),)


def test_forget_is_refused_until_clients_had_time_to_reconnect():
    """A waiting call leaves no trace after a restart."""
    world = World(1)
    world.do(StoreRequest(world.new_session(), RUN, Set((("k", b"v"),))))
    world.crash()
    assert "the coordinator has just begun. Ask again in 10 s" in refused(world)
    world.wait(TTL)
    assert isinstance(forget(world), RunForgotten)
    assert_nothing_left(world)
