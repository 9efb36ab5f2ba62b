"""Notices, drains and deadlines in the sequences that a review found wrong."""

import pytest

from muster.client.save_votes import PREFIX
from muster.service.core.vocabulary.effects import DrainedRun, NodeDrained, SaveRequested
from muster.service.core.vocabulary.events import (
    CancelSave,
    DrainNode,
    Hello,
    JoinGroup,
    ProcessInfo,
    RequestSave,
)
from muster.service.core.vocabulary.model import SaveState
from muster.service.core.vocabulary.records import SaveRecord
from tests.support.expect import some
from tests.support.world.core_world import RUN, WALL, World
from tests.support.world.rendezvous_world import KEEP_ALIVE, LAST_CALL, RendezvousWorld, nodes
from tests.unit.service.core.saves.answers import newest, save


def ask(
    world: World, notice: str = "", deadline: float | None = None, *, stop: bool = True, by: str = "watcher"
) -> SaveRequested:
    (answer,) = world.ask(RequestSave(900, RUN, stop, by, "spot", deadline=deadline, notice=notice))
    assert isinstance(answer, SaveRequested)
    return answer


def drain(world: World, node: str, notice: str, *, stop: bool = True) -> tuple[DrainedRun, ...]:
    (answer,) = world.ask(DrainNode(900, node, (RUN,), stop, "watcher", "spot", None, notice))
    assert isinstance(answer, NodeDrained)
    return answer.runs


# ---------------------------------------------------------------------- more notices than are kept


def test_hundred_notices_in_force_are_one_save_and_not_one_every_ten_seconds(world: World):
    """A run on 100 nodes, each with a rebalance recommendation.

    The watchers repeat them, and it saves for ever.
    """
    clients = world.ranks(prefix=PREFIX)
    for _ in range(6):
        for node in range(100):
            ask(world, f"aws/rebalance/node-{node}", stop=False)
        if newest(world).state is SaveState.ASKED:
            save(clients, stop=False, number=newest(world).number)
        world.wait(10.0)
    assert newest(world).number == 1


def test_job_with_hundred_notices_is_not_stopped_again_after_it_resumed(world: World):
    """The same with stop: each new generation of the job is stopped again for notices that were heeded."""
    clients = world.ranks(prefix=PREFIX)
    for node in range(100):
        ask(world, f"slurm/node/{node}")
    save(clients, stop=True, number=1)
    world.ranks(prefix=PREFIX, generation=1)
    asked = [ask(world, f"slurm/node/{node}").was_asked for node in range(100)]
    assert all(asked)


# ---------------------------------------------------------------------- heeded notices


def test_repeated_notice_of_a_done_save_sets_no_deadline_for_another_request(world: World):
    """n1 led to save 1, which is done. Its repetition gives the operator's save 2 a deadline."""
    clients = world.ranks(prefix=PREFIX)
    ask(world, "n1", 100.0, stop=False)
    save(clients, stop=False, number=1)
    ask(world, stop=False, by="ann")
    ask(world, "n1", 40.0, stop=False)
    assert newest(world).number == 2
    assert newest(world).deadline is None


def test_repeated_notice_that_was_withdrawn_sets_no_deadline_for_another_request(world: World):
    """An operator withdrew n1's save. Its repetition makes the operator's own save 2 late."""
    world.ranks(prefix=PREFIX)
    ask(world, "n1", 100.0)
    world.do(CancelSave(900, RUN, "the node stays"))
    ask(world, by="ann")
    world.wait(95.0)
    ask(world, "n1", 5.0)
    world.wait(10.0)
    assert not newest(world).late


def test_repeated_plain_notice_of_a_done_save_adds_no_save_to_a_request_to_stop(world: World):
    """n1's plain save is done.

    Its repetition makes request 2 (stop) cover it: when 2 lapses, all save again.
    """
    clients = world.ranks(prefix=PREFIX)
    ask(world, "n1", stop=False)
    save(clients, stop=False, number=1)
    ask(world, by="ann")
    ask(world, "n1", stop=False)
    world.ranks(prefix=PREFIX, generation=1)
    assert newest(world).state is SaveState.LAPSED


# ---------------------------------------------------------------------- a run that is stopped


def test_notice_that_comes_while_the_run_is_stopped_is_remembered(world: World):
    """n2 is answered by the save that stopped the run. After the restart it stops the job a second time."""
    clients = world.ranks(prefix=PREFIX)
    ask(world, "n1")
    save(clients, stop=True, number=1)
    assert ask(world, "n2").save.number == 1
    world.ranks(prefix=PREFIX, generation=1)
    assert ask(world, "n1").was_asked
    assert ask(world, "n2").was_asked


# ---------------------------------------------------------------------- deadlines


def test_second_try_for_a_later_notice_is_not_late_at_once(world: World):
    """The try before failed, and its deadline has passed.

    N2 has 120 s, and is late after 0 s, without a probe.
    """
    clients = world.ranks(prefix=PREFIX)
    ask(world, "n1", 10.0)
    world.wait(20.0)
    clients[0].arrive(PREFIX, failure="it alone has restarted")
    clients[1].arrive(PREFIX, payload=b"agree 9 1 1")
    answer = ask(world, "n2", 120.0)
    assert answer.save.number == 2
    assert some(some(clients[0].save_asked).seconds_left) > 0
    world.wait(1.0)
    assert not newest(world).late


def test_notice_with_time_left_is_announced_although_an_older_deadline_has_passed(world: World):
    """A plain save has waited for a rank since yesterday.

    Today's notice with 120 s has no time left, for all.
    """
    clients = world.ranks(prefix=PREFIX)
    ask(world, "", 10.0, stop=False)
    world.wait(86_400.0)
    ask(world, "aws/spot/today", 120.0, stop=True)
    assert some(some(clients[0].save_asked).seconds_left) == pytest.approx(120.0)


def test_request_of_the_next_generation_is_late_again_by_its_own_ranks(world: World):
    """A plain request outlives its generation with ``late`` of the generation before.

    Those ranks are no more.
    """
    world.ranks(prefix=PREFIX)
    ask(world, deadline=10.0, stop=False)
    world.wait(11.0)
    assert newest(world).late
    world.ranks(prefix=PREFIX, generation=1)
    assert newest(world).state is SaveState.ASKED
    assert not newest(world).late


def test_ranks_of_an_older_generation_are_not_named_as_late(world: World):
    """Generation 1 is there and has not joined the group yet: the dead of generation 0 are named."""
    old = world.ranks(prefix=PREFIX)
    ask(world, deadline=60.0, stop=False)
    new = [world.start(rank, generation=1) for rank in range(2)]
    world.wait(61.0)
    late = newest(world).late
    assert all(f"pid {client.pid}" in late for client in new), late
    assert not any(f"pid {client.pid}" in late for client in old), late


def test_repeated_notice_with_deadline_drift_of_milliseconds_writes_and_sends_nothing(world: World):
    """Each repetition is less than 10 ms faster than the one before.

    Each is written, and sent to all ranks.
    """
    world.ranks(prefix=PREFIX)
    ask(world, "n1", 100.0)
    written = sent = 0
    for number in range(1, 9):
        world.wait(10.0)
        ask(world, "n1", 100.0 - 10.0 * number - 0.002 * number)
        written += sum(isinstance(one, SaveRecord) for one in world.last.records)
        sent += len(world.last.deliveries) - 1
    assert (written, sent) == (0, 0)


def test_plain_request_keeps_its_own_deadline_when_the_stop_that_replaced_it_lapses(world: World):
    """``ann`` asked for a save in 600 s.

    A stop came and lapsed: her request goes on, without its deadline.
    """
    world.ranks(prefix=PREFIX)
    before = ask(world, deadline=600.0, stop=False, by="ann").save.deadline
    ask(world, "n1")
    world.ranks(prefix=PREFIX, generation=1)
    assert newest(world).state is SaveState.ASKED
    assert (newest(world).by, newest(world).deadline) == ("ann", before)


def test_repeated_plain_notice_adds_no_save_if_its_save_was_done_after_a_stop_lapsed(world: World):
    """n2 (plain) was covered by n1's stop, which lapses.

    N2's save goes on, is done, and n2 asks once more.
    """
    world.ranks(prefix=PREFIX)
    ask(world, "n1")
    ask(world, "n2", stop=False)
    clients = world.ranks(prefix=PREFIX, generation=1)
    assert (newest(world).number, newest(world).stop) == (2, False)
    save(clients, stop=False, number=2)
    assert newest(world).state is SaveState.DONE
    assert ask(world, "n2", stop=False).was_asked


# ---------------------------------------------------------------------- watchers that lie


def test_watcher_of_one_node_cannot_use_up_the_notice_of_another_node(world: World):
    """The watcher of node-1 sends a plain notice with the id of node-2's.

    Node-2's request to stop is swallowed.
    """
    for rank, node in enumerate(("node-1", "node-2")):
        session = world.new_session()
        world.do(Hello(session, RUN, 0, (ProcessInfo(rank, f"p-{rank}", "pod", 7, node_name=node),)))
        world.do(JoinGroup(session, PREFIX, 2))
    drain(world, "node-1", "aws/spot/node-2/terminate", stop=False)
    (one,) = drain(world, "node-2", "aws/spot/node-2/terminate")
    assert one.save.stop


# ---------------------------------------------------------------------- time


def test_clock_that_is_set_back_does_not_delay_the_report(world: World, monkeypatch: pytest.MonkeyPatch):
    """The wall clock is set back by an hour: late ranks are named an hour late, and ranks hear of 3,660 s."""
    world.ranks(prefix=PREFIX)
    ask(world, deadline=60.0)
    monkeypatch.setattr("tests.support.world.core_world.WALL", WALL - 3600.0)
    late_comer = world.start(0)
    world.wait(61.0)
    assert some(some(late_comer.save_asked).seconds_left) <= 60.0
    assert newest(world).late


def test_clock_that_is_set_forward_leaves_the_time(world: World, monkeypatch: pytest.MonkeyPatch):
    """The wall clock is set forward by an hour: a rank that connects hears that no time is left, of 120 s."""
    world.ranks(prefix=PREFIX)
    ask(world, deadline=120.0)
    monkeypatch.setattr("tests.support.world.core_world.WALL", WALL + 3600.0)
    assert some(some(world.start(0).save_asked).seconds_left) == pytest.approx(120.0)


# ---------------------------------------------------------------------- nodes


def test_run_is_not_stopped_if_the_drained_node_left_the_forming_round():
    """node c is drained while the round forms, and leaves.

    The round of a and b is stopped at its first step.
    """
    world = RendezvousWorld(nodes(2, 3))
    world.agent("a")
    c = world.agent("c")
    drain(world, "c", "n1")
    c.leave("it was drained")
    world.agent("b")
    world.wait(LAST_CALL)
    clients = world.ranks(2, prefix=PREFIX, generation=world.rendezvous.round)
    heard = [client.save_asked for client in clients]
    assert all(one is None or one.withdrawn or not one.stop for one in heard), heard


def test_unary_call_of_days_ago_does_not_put_a_run_on_a_node(world: World):
    """Someone called Arrive once from node-9, and hung up. A drain of node-9 a day later stops the run."""
    world.ranks(prefix=PREFIX)
    call = world.arrive_once(1, process=ProcessInfo(1, "grpcurl", "node-9", 1), prefix="eval")
    world.do(call)
    world.hang_up(call.session)
    world.wait(86_400.0)
    assert drain(world, "node-9", "n1") == ()


def test_node_that_only_waits_for_the_next_round_does_not_stop_the_run():
    """Issue 32: "A notice for a node without ranks does nothing." Node c waits beside a complete round."""
    world = RendezvousWorld(nodes(2, 3))
    world.several("a", "b")
    world.wait(LAST_CALL)
    clients = world.ranks(2, prefix=PREFIX, generation=world.rendezvous.round)
    world.agent("c")
    assert drain(world, "c", "n1") == ()
    assert all(client.save_asked is None for client in clients)


# ---------------------------------------------------------------------- cost and size


def test_log_entry_of_late_ranks_is_bounded():
    """With 65,536 ranks the log entry has 480 KB, and the loop stands still for 0.4 s.

    Only the record is cut.
    """
    world = World(world_size=2048)
    world.watching = False
    for node in range(256):
        ranks = tuple(ProcessInfo(r, f"p{r}", f"node-{node}", 7) for r in range(node * 8, node * 8 + 8))
        world.do(Hello(node + 1, RUN, 0, ranks))
    ask(world, deadline=60.0)
    world.tick()
    world.tick()
    (late,) = (notice for notice in world.last.notices if notice.event == "save.late")
    assert len(late.message) < 5_000


def test_repeated_notice_of_ranks_that_cannot_agree_is_not_late_every_ten_seconds(world: World):
    """The watcher repeats n1 after its deadline, with 1 ms left.

    Each try is a new request that is late at once.
    """
    clients = world.ranks(prefix=PREFIX)
    ask(world, "n1", 10.0)
    entries = 0
    for _ in range(5):
        world.wait(10.0)
        clients[0].arrive(PREFIX, failure="its training is over")
        clients[1].arrive(PREFIX, payload=b"agree 9 1 1")
        ask(world, "n1", 0.001)
        world.tick()
        entries += sum(notice.event == "save.late" for notice in world.last.notices)
    assert entries <= 1


def test_job_that_has_finished_is_not_late(world: World):
    """All ranks said goodbye before the deadline: a warning names ranks that have left as late."""
    clients = world.ranks(prefix=PREFIX)
    ask(world, deadline=60.0, stop=False)
    for client in clients:
        client.goodbye()
    world.wait(61.0)
    assert not newest(world).late


# ---------------------------------------------------------------------- a round that is ahead of the ranks


def test_notice_repeated_while_a_new_round_forms_does_not_replace_an_agreed_save():
    """The agents' places are gone, their workers save still, and a new agent forms round 1. n1 comes again.

    If that made request 2, for round 1, the votes for request 1 would count for nothing. Training ended, but
    the run would not be STOPPED, and the job that starts in round 1 would be stopped at once.
    """
    world = RendezvousWorld(nodes(2, 3))
    a, b = world.several("a", "b")
    world.wait(LAST_CALL)
    clients = world.ranks(2, prefix=PREFIX)
    ask(world, "n1")
    for client in clients:
        client.arrive(PREFIX, payload=b"agree 9 1 1")
    assert newest(world).state is SaveState.AGREED
    a.lose_stream()
    b.lose_stream()
    world.wait(KEEP_ALIVE + 1)
    world.agent("a")
    ask(world, "n1")
    for client in clients:
        client.arrive(PREFIX, payload=b"done 9 1 1")
    run = world.coordinator.runs[RUN]
    assert run.stopping.stopped is not None
    assert not newest(world).state.stands
