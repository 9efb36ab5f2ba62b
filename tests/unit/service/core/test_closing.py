"""Invariant 13 (closing is final): all learn of it, and membership ends, but barriers do not."""

import pytest

from muster.service.core.vocabulary.effects import RunClosed
from muster.service.core.vocabulary.events import CloseRun
from muster.service.core.vocabulary.model import Closed, NodeStanding, Outcome
from muster.service.core.vocabulary.records import RunRecord
from muster.service.core.vocabulary.refusal import Reason
from tests.support.expect import some
from tests.support.world.core_client import CKPT
from tests.support.world.core_disk import Crash
from tests.support.world.core_world import RUN, WALL, World
from tests.support.world.rendezvous_world import KEEP_ALIVE, LAST_CALL, RendezvousWorld, nodes


@pytest.fixture
def job():
    """Nodes a and b in round 0, and c waiting; ranks 0 and 1 in the group."""
    world = RendezvousWorld(nodes(2, 3))
    world.several("a", "b")
    world.wait(LAST_CALL)
    world.agent("c")
    world.ranks(2)
    return world


def close_at(now, by="node-0", reason=""):
    return Closed(by, reason, WALL + now)


# ---------------------------------------------------------------------- who learns of it


def test_closing_is_announced_to_nodes_and_processes(job):
    a, b, _ = job.agents
    closed = close_at(job.now, "me", "all is done")
    assert job.close("me", "all is done") == RunClosed(closed, was_closed=False)
    assert [one.closed for one in (a, b, *job.clients)] == [[closed]] * 4
    assert (a.rank, b.rank, a.reason) == (0, 1, None)


def test_closing_a_run_ends_every_join_that_waits(job):
    c = job.agents[2]
    job.close("me", "done")
    assert (c.reason, c.session) == (Reason.RUN_CLOSED, None)
    assert c.refusal.message.startswith("run job1 was closed by me: done. A closed run admits no newcomers")
    assert not job.rendezvous.of(NodeStanding.WAITING)


def test_closing_a_run_ends_a_round_that_comes_together():
    world = RendezvousWorld(nodes(2, 3))
    agents = world.several("a", "b")
    world.close()
    assert [one.reason for one in agents] == [Reason.RUN_CLOSED] * 2
    world.wait(10 * LAST_CALL)
    assert not world.completed


def test_closing_ends_standby_without_an_error():
    world = RendezvousWorld(nodes(1))
    a, b = world.several("a", "b")
    world.close("me", "done")
    assert (a.reason, b.reason) == (None, Reason.NODE_NOT_NEEDED)
    assert some(b.refusal).message == (
        f"run job1 was closed by me: done, while node b (pid {b.pid}) stood by; it was not needed."
    )


def test_no_node_waits_after_closing(job):
    a, b, _ = job.agents
    assert (a.waiting, b.waiting) == (1, 1)
    job.close()
    job.wait(1)
    assert (a.waiting, b.waiting) == (0, 0)


def test_disconnected_nodes_and_ranks_learn_of_the_close_when_they_reconnect(job):
    a, _, c = job.agents
    zero = job.clients[0]
    a.lose_stream()
    c.lose_stream()
    zero.lose_connection()
    job.close()
    for one in (a, c, zero):
        one.connect()
    assert (len(a.closed), a.rank) == (1, 0)
    assert c.reason is Reason.RUN_CLOSED
    assert len(zero.closed) == 1


# ---------------------------------------------------------------------- sticky


def test_first_close_counts(job):
    closed = close_at(job.now, "first", "why")
    job.close("first", "why")
    job.wait(5)
    assert job.close("second", "because") == RunClosed(closed, was_closed=True)
    assert not job.last.records
    assert [len(one.closed) for one in (*job.agents[:2], *job.clients)] == [1] * 4


def test_closed_survives_a_restart(job):
    a, b, c = job.agents
    closed = close_at(job.now, "me", "done")
    job.close("me", "done")
    job.crash()
    for one in (a, b, c, *job.clients):
        one.connect()
    assert job.coordinator.runs[RUN].closed == closed
    assert [one.closed for one in (a, b, *job.clients)] == [[closed, closed]] * 4
    assert c.reason is Reason.RUN_CLOSED
    assert job.close("other") == RunClosed(closed, was_closed=True)


@pytest.mark.parametrize("crash", Crash)
def test_unanswered_close_is_whole_or_absent_after_a_restart(job, crash):
    a, _, c = job.agents
    job.crash_next = crash
    job.do(CloseRun(job.new_session(), RUN, "me", "", False))
    kept = crash is Crash.AFTER_PERSIST
    a.connect()
    c.connect()
    assert len(a.closed) == kept
    assert c.reason is (Reason.RUN_CLOSED if kept else None)


def test_closed_run_stays_closed_in_its_next_generation_on_disk(job):
    """A generation that is already on its way is refused, so that the record stays as it is."""
    job.close()
    job.start(0, generation=1)
    assert job.clients[-1].reason is Reason.RUN_CLOSED
    (record,) = job.disk.of_kind(RunRecord)
    assert (record.generation, record.closed is None) == (0, False)


# ---------------------------------------------------------------------- newcomers


def test_closed_run_admits_no_new_nodes(job):
    c = job.agents[2]
    job.close()
    assert job.agent("d").reason is Reason.RUN_CLOSED
    c.join()
    assert c.reason is Reason.RUN_CLOSED


def test_node_of_a_closed_run_cannot_leave_its_round_for_another(job):
    a, b, _ = job.agents
    job.close()
    a.join()
    b.join()
    assert (a.reason, b.reason) == (Reason.RUN_CLOSED, Reason.RUN_CLOSED)
    job.wait(KEEP_ALIVE + LAST_CALL)
    assert len(job.completed) == 1


def test_closed_run_admits_no_new_generation(job):
    job.close("me", "done")
    later = job.start(0, generation=1)
    assert later.reason is Reason.RUN_CLOSED
    assert "start the job under another run id" in later.refusals[-1].refusal.message


def test_closed_run_without_a_round_admits_no_new_rank():
    world = World(2)
    world.start(0)
    world.do(CloseRun(world.new_session(), RUN, "me", ""))
    assert world.start(1).refusals[-1].refusal.reason is Reason.RUN_CLOSED


def test_nodes_that_leave_a_closed_run_are_not_lost_to_the_others():
    world = RendezvousWorld(nodes(1, 2))
    a, b = world.several("a", "b")
    world.close()
    a.leave()
    world.wait(KEEP_ALIVE)
    assert (b.rank, b.waiting, b.lost, len(world.rendezvous.losses)) == (1, 0, 0, 0)


def test_workers_of_the_last_round_may_still_start_a_checkpoint(job):
    """They may have said no hello before the run was closed."""
    job.close("me", "done")
    late = job.start(2)
    assert (late.refusals, len(late.closed)) == ([], 1)
    for agent in job.agents[:2]:
        agent.leave()
    assert job.start(3).reason is Reason.RUN_CLOSED


def test_rank_that_is_there_may_bring_another_process_into_a_closed_run(job):
    """Its last checkpoint may be written by a child."""
    job.close()
    child = job.start(0)
    assert (child.refusals, len(child.closed)) == ([], 1)


def test_process_without_a_group_reconnects_to_a_closed_run():
    world = World(2)
    idle = world.start(0)
    world.do(CloseRun(world.new_session(), RUN, "me", ""))
    world.crash()
    idle.connect()
    assert (idle.refusals, len(idle.closed)) == ([], 2)


# ---------------------------------------------------------------------- barriers


def test_members_of_a_closed_run_finish_their_barriers(job):
    zero, one = job.clients
    zero.arrive()
    job.close()
    assert one.arrive().outcome is Outcome.RELEASED
    zero.arrive()
    assert one.arrive().outcome is Outcome.RELEASED
    job.assert_good()


def test_close_with_abort_ends_open_barriers(job):
    zero, one = job.clients
    zero.arrive()
    zero.arrive("eval")
    job.close("me", "disk\x1b full", abort=True)
    for prefix in (CKPT, "eval"):
        decision = zero.memberships[prefix].heard[-1]
        assert decision.outcome is Outcome.ABORTED
        assert "was aborted: run job1 was closed by me: disk\\x1b full" in decision.message
    assert one.arrive() == zero.memberships[CKPT].heard[-1]


def test_run_that_is_closed_may_have_its_barriers_ended_later(job):
    zero, _ = job.clients
    zero.arrive()
    job.close()
    assert job.close("second", abort=True).was_closed
    assert zero.last.outcome is Outcome.ABORTED
    assert "was closed by node-0" in zero.last.message


def test_closing_is_noticed_once(job):
    event = CloseRun(job.new_session(), RUN, "me", "done")
    notices = job.do(event).notices + job.do(event).notices
    assert [(one.event, one.message) for one in notices] == [
        ("run.closed", "run job1 was closed by me: done")
    ]


def test_run_without_nodes_can_be_closed():
    world = World(2)
    zero, _ = world.ranks()
    world.do(CloseRun(world.new_session(), RUN, "me", ""))
    assert len(zero.closed) == 1


def test_unknown_run_can_be_closed_with_create():
    world = RendezvousWorld(nodes(1))
    (answer,) = world.ask(CloseRun(world.new_session(), RUN, "me", "too late", create=True))
    assert answer == RunClosed(close_at(world.now, "me", "too late"), was_closed=False)
    world.crash()
    assert world.agent("a").reason is Reason.RUN_CLOSED
