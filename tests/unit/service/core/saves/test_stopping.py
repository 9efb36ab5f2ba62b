"""Invariant 23 (stopped is not finished): a run that was stopped on request can be started again."""

import pytest

from muster.client.save_votes import PREFIX
from muster.service.core import views
from muster.service.core.vocabulary.effects import RunClosed, SaveRequested
from muster.service.core.vocabulary.events import CloseRun, Goodbye, RequestSave
from muster.service.core.vocabulary.model import SaveState, Stopped
from muster.service.core.vocabulary.refusal import Reason
from tests.support.expect import some
from tests.support.world.core_client import Client
from tests.support.world.core_world import RUN, WALL, World
from tests.support.world.rendezvous_world import KEEP_ALIVE, LAST_CALL, RendezvousWorld, nodes
from tests.unit.service.core.saves.answers import newest, save


def ask(world: World, *, stop: bool = True, across: bool = False) -> object:
    event = RequestSave(world.new_session(), RUN, stop, "ann", "a drain", across_generations=across)
    (answer,) = world.ask(event)
    return answer


def stopped(world: World) -> Stopped | None:
    return world.coordinator.runs[RUN].stopping.stopped


def stop_run(world: World, clients: list[Client]) -> None:
    """Somebody asks all ranks to save and stop, and they do."""
    ask(world)
    save(clients, stop=True, number=1)


def leave(world: World, clients: list[Client]) -> None:
    for client in clients:
        world.do(Goodbye(some(client.session)))


def job(most: int = 2) -> tuple[RendezvousWorld, list[Client]]:
    """Nodes a and b in round 0, each with a rank."""
    world = RendezvousWorld(nodes(2, most))
    world.several("a", "b")
    world.wait(LAST_CALL)
    return world, world.ranks(2, prefix=PREFIX)


def close(world: World, *, even_if_stopped: bool = False) -> RunClosed:
    event = CloseRun(world.new_session(), RUN, "node a", "over", even_if_stopped=even_if_stopped)
    (answer,) = world.ask(event)
    assert isinstance(answer, RunClosed)
    return answer


# ---------------------------------------------------------------------- what stops a run


def test_run_is_stopped_when_all_ranks_confirmed_the_last_save():
    world, clients = job()
    ask(world)
    assert stopped(world) is None
    save(clients, stop=True, number=1)
    assert stopped(world) == Stopped(9, "ann", "a drain", WALL + world.now, 0)
    assert views.run(world.coordinator.runs[RUN], world.instant).stopped == stopped(world)


def test_save_without_a_stop_leaves_the_run_open():
    world, clients = job()
    ask(world, stop=False)
    save(clients, stop=False, number=1)
    assert newest(world).state is SaveState.DONE
    assert stopped(world) is None


def test_stop_is_remembered_by_a_restarted_coordinator():
    world, clients = job()
    stop_run(world, clients)
    before = stopped(world)
    world.crash()
    assert stopped(world) == before
    assert world.rendezvous.stopped == before


# ---------------------------------------------------------------------- its nodes


def test_nodes_of_a_stopped_round_hear_of_the_stop_and_of_departures():
    world, clients = job()
    a, b = world.agents
    stop_run(world, clients)
    assert [one.nodes_gone for one in a.stopped] == [0]
    assert a.stopped == b.stopped
    a.leave("a signal")
    assert [one.nodes_gone for one in b.stopped] == [0, 1]
    b.lose_stream()
    b.connect()
    assert b.stopped[-1].nodes_gone == 1


def test_silent_node_of_a_stopped_round_is_reported_as_gone():
    world, clients = job()
    a, b = world.agents
    stop_run(world, clients)
    a.lose_stream()
    world.wait(KEEP_ALIVE + 1)
    assert [one.nodes_gone for one in b.stopped] == [0, 1]


def test_agent_of_a_stopped_round_is_refused_another_attempt():
    world, clients = job()
    a, b = world.agents
    stop_run(world, clients)
    a.join()
    assert a.reason is Reason.RUN_STOPPED
    b.leave()
    b.join()
    assert b.reason is Reason.RUN_STOPPED
    assert "same run id resumes the job" in some(b.refusal).message


def test_nodes_on_standby_are_sent_away_when_the_run_is_stopped():
    world, clients = job()
    spare = world.agent("c")
    stop_run(world, clients)
    assert spare.reason is Reason.RUN_STOPPED


def test_new_agents_do_not_interrupt_a_stopped_round_and_start_the_next():
    world, clients = job()
    a, b = world.agents
    stop_run(world, clients)
    again = [world.agent("a"), world.agent("b")]
    world.wait(5)
    assert not a.told_waiting
    assert not b.told_waiting
    leave(world, clients)
    a.leave()
    b.leave()
    assert {one.rank for one in again} == {0, 1}
    assert stopped(world) is None
    world.ranks(2, prefix=PREFIX, generation=some(again[0].place).round)
    assert all(some(client.save_asked).withdrawn for client in world.clients[2:])


# ---------------------------------------------------------------------- closing


def test_agent_does_not_close_a_stopped_run():
    world, clients = job()
    stop_run(world, clients)
    answer = close(world)
    assert (answer.closed, answer.stopped) == (None, stopped(world))
    assert world.coordinator.runs[RUN].closed is None


def test_operator_closes_a_stopped_run_for_good():
    world, clients = job()
    stop_run(world, clients)
    answer = close(world, even_if_stopped=True)
    assert answer.closed is not None
    assert (answer.stopped, stopped(world)) == (None, None)
    assert world.agent("z").reason is Reason.RUN_CLOSED


def test_finished_run_is_closed_by_its_agents():
    world, clients = job()
    leave(world, clients)
    assert close(world).closed is not None


# ---------------------------------------------------------------------- starting again without a rendezvous


def test_job_that_starts_again_in_its_generation_is_not_stopped():
    world = World()
    clients = world.ranks(prefix=PREFIX)
    stop_run(world, clients)
    leave(world, clients)
    again = world.ranks(prefix=PREFIX)
    assert stopped(world) is None
    assert all(some(client.save_asked).withdrawn for client in again)
    world.crash()
    assert stopped(world) is None


# ---------------------------------------------------------------------- how long a request is kept


def test_request_to_a_stopped_run_is_the_one_that_stopped_it():
    world, clients = job()
    stop_run(world, clients)
    leave(world, clients)
    for stop in (True, False):
        answer = ask(world, stop=stop)
        assert isinstance(answer, SaveRequested)
        assert (answer.was_asked, answer.save.number) == (True, 1)


@pytest.mark.parametrize("generation", [0, 1])
def test_request_with_stop_lapses_when_the_job_starts_again(generation: int):
    world = World()
    clients = world.ranks(prefix=PREFIX)
    ask(world)
    leave(world, clients)
    again = world.ranks(prefix=PREFIX, generation=generation)
    assert newest(world).state is SaveState.LAPSED
    assert all(some(client.save_asked).withdrawn for client in again)
    # It may be asked for once more.
    answer = ask(world)
    assert isinstance(answer, SaveRequested)
    assert (answer.was_asked, answer.save.number) == (False, 2)


def test_request_across_generations_outlives_a_restart_of_the_job():
    world = World()
    clients = world.ranks(prefix=PREFIX)
    ask(world, across=True)
    leave(world, clients)
    again = world.ranks(prefix=PREFIX, generation=1)
    assert newest(world).state is SaveState.ASKED
    save(again, stop=True, number=1)
    assert some(stopped(world)).generation == 1


def test_request_during_a_restart_is_for_the_round_that_forms():
    world, clients = job()
    leave(world, clients)
    for agent in world.agents[:2]:
        agent.join()
    ask(world)
    world.ranks(2, prefix=PREFIX, generation=1)
    assert newest(world).state is SaveState.ASKED


def test_request_without_members_is_refused():
    world = World()
    clients = world.ranks(prefix=PREFIX)
    leave(world, clients)
    answer = ask(world)
    assert some(getattr(answer, "refusal", None)).reason is Reason.NO_MEMBERS
    assert world.coordinator.runs[RUN].saving.save is None


# ---------------------------------------------------------------------- what follows a stop


def ended_job() -> RendezvousWorld:
    """A run that was stopped, and that all its processes and agents have left."""
    world, clients = job()
    stop_run(world, clients)
    leave(world, clients)
    for agent in world.agents[:2]:
        agent.leave()
    return world


def resumed() -> tuple[RendezvousWorld, list[Client]]:
    """A run that was stopped, and resumed by two new agents without processes so far."""
    world = ended_job()
    world.crash()
    agents = world.several("c", "d")
    world.wait(LAST_CALL + 1)
    assert all(agent.place is not None for agent in agents)
    return world, world.ranks(2, prefix=PREFIX, generation=some(agents[0].place).round)


def signal_to_rank(world: World) -> SaveRequested:
    """A rank that has heard of no request gets a signal."""
    (answer,) = world.ask(RequestSave(world.new_session(), RUN, True, "rank 0", "SIGTERM", known=0))
    assert isinstance(answer, SaveRequested)
    return answer


def test_nodes_of_a_resumed_run_hear_nothing_of_the_old_stop():
    world, _ = resumed()
    c, d = world.agents[2:]
    c.lose_stream()
    world.wait(KEEP_ALIVE + 1)
    d.lose_stream()
    d.connect()
    assert not d.stopped
    world.agent("e")
    world.wait(5)
    assert d.told_waiting[-1][1] == 1


def test_signal_in_the_resumed_run_is_a_request_of_its_own():
    world, _ = resumed()
    assert not signal_to_rank(world).was_asked
    assert newest(world).state is SaveState.ASKED


def test_old_stop_does_not_return_if_the_next_round_ends_early():
    world = ended_job()
    c, d = world.several("c", "d")
    world.wait(LAST_CALL + 1)
    c.join()
    d.leave("killed")
    assert stopped(world) is None
    assert c.reason is None


def test_request_while_the_next_round_forms_is_not_the_old_one():
    world = ended_job()
    world.agent("c")
    answer = ask(world)
    assert isinstance(answer, SaveRequested)
    assert not answer.was_asked


def test_lost_agent_of_a_stopped_round_is_refused_after_a_restart_of_the_coordinator():
    world, clients = job()
    a, _ = world.agents
    stop_run(world, clients)
    a.lose_stream()
    world.wait(KEEP_ALIVE + 1)
    world.crash()
    a.connect()
    assert a.reason is Reason.RUN_STOPPED


def test_agents_that_restart_workers_for_a_waiting_node_do_not_stop_the_run():
    world, clients = job(3)
    c = world.agent("c")
    world.wait(2)
    assert world.agents[0].told_waiting[-1][1] == 1
    assert not signal_to_rank(world).save.stop
    save(clients, stop=False, number=1)
    leave(world, clients)
    for agent in world.agents[:2]:
        agent.join()
    world.wait(LAST_CALL + 1)
    assert {agent.rank for agent in (*world.agents[:2], c)} == {0, 1, 2}


def test_stop_while_a_round_forms_sends_the_old_agents_away():
    world, clients = job()
    ask(world)
    for client in clients:
        client.arrive(PREFIX, payload=b"agree 9 1 1")
    a, b = world.agents
    b.leave()
    a.join()
    for client in clients:
        client.arrive(PREFIX, payload=b"done 9 1 1")
    assert stopped(world) is not None
    assert a.reason is Reason.RUN_STOPPED


def test_closed_run_is_not_stopped():
    world, clients = job()
    close(world)
    stop_run(world, clients)
    assert stopped(world) is None
    assert not world.agents[0].stopped


def test_departures_of_many_nodes_are_told_in_few_messages():
    world = RendezvousWorld(nodes(32))
    world.several(*[f"node-{number}" for number in range(32)])
    world.world_size = 32
    clients = world.ranks(32, prefix=PREFIX)
    stop_run(world, clients)
    for agent in world.agents[:31]:
        agent.leave()
    last = world.agents[31]
    world.wait(2)
    assert last.stopped[-1].nodes_gone == 31
    assert sum(len(agent.stopped) for agent in world.agents) <= 3 * 32


def test_request_extends_a_pending_one_across_generations():
    world = World()
    clients = world.ranks(prefix=PREFIX)
    ask(world)
    answer = ask(world, across=True)
    assert isinstance(answer, SaveRequested)
    assert answer.was_asked
    leave(world, clients)
    world.ranks(prefix=PREFIX, generation=1)
    assert newest(world).state is SaveState.ASKED


def test_request_during_a_restart_is_not_covered_by_one_that_lapses():
    world, clients = job()
    ask(world)
    leave(world, clients)
    for agent in world.agents[:2]:
        agent.join()
    answer = ask(world, stop=False)
    assert isinstance(answer, SaveRequested)
    assert (answer.was_asked, answer.save.stop) == (False, False)


def test_lost_process_does_not_keep_a_run_stopped_that_began_again():
    world = World()
    clients = world.ranks(prefix=PREFIX)
    stop_run(world, clients)
    leave(world, clients[1:])
    clients[0].lose_connection()
    world.ranks(prefix=PREFIX)
    assert stopped(world) is None


def test_signal_of_an_older_generation_does_not_stop_the_job():
    """The signal may be that of an agent that has ended its workers for the next round."""
    world = World()
    world.ranks(2, prefix=PREFIX)
    world.ranks(2, prefix=PREFIX, generation=1)
    event = RequestSave(world.new_session(), RUN, True, "rank 0", "SIGTERM", known=0, generation=0)
    assert world.refused(event).refusal.reason is Reason.STALE_GENERATION
    assert world.coordinator.runs[RUN].saving.save is None
    (answer,) = world.ask(RequestSave(900, RUN, True, "rank 0", "SIGTERM", known=0, generation=1))
    assert isinstance(answer, SaveRequested)
