"""A complete round loses a node: the others hear of it, if they can go on without it."""

import pytest

from muster.service.core.rendezvous.losses import RESTART_TIME
from muster.service.core.vocabulary.events import RequestSave
from muster.service.core.vocabulary.model import Save
from muster.service.core.vocabulary.records import ParticipantRecord
from tests.support.world.rendezvous_world import KEEP_ALIVE, LAST_CALL, Agent, RendezvousWorld, nodes


def complete(world: RendezvousWorld, fewest: int, most: int) -> list[Agent]:
    agents = [world.agent(f"node-{number}", nodes(fewest, most)) for number in range(most)]
    for agent in agents:
        agent.join()
    assert world.ranks_of(*agents) == list(range(most))
    return agents


def test_round_that_lost_a_node_goes_on_without_it():
    world = RendezvousWorld()
    a, b, lost = complete(world, 2, 3)
    lost.lose_stream()
    assert (a.lost, b.lost) == (0, 0)
    world.wait(KEEP_ALIVE)
    assert (a.lost, b.lost, a.waiting) == (1, 1, 0)
    a.join()
    b.join()
    assert (a.lost, b.lost) == (0, 0)
    world.wait(LAST_CALL)
    assert world.ranks_of(a, b) == [0, 1]
    assert (a.lost, b.lost) == (0, 0)
    assert len([record for record in world.disk.records() if isinstance(record, ParticipantRecord)]) == 2


def signalled(world: RendezvousWorld, agent: Agent) -> Save:
    """A rank gets a signal."""
    world.do(RequestSave(world.new_session(), agent.run, True, "rank 0", "SIGTERM", known=0))
    save = world.coordinator.runs[agent.run].saving.save
    assert save is not None
    return save


@pytest.mark.parametrize(
    ("passed", "closed", "stops"),
    [(1.0, False, False), (RESTART_TIME, False, True), (1.0, True, True)],
    ids=["agents restart", "agents did not restart", "closed run"],
)
def test_signal_stops_the_run_unless_agents_restart_their_workers(passed: float, closed: bool, stops: bool):
    world = RendezvousWorld()
    a, _, lost = complete(world, 2, 3)
    lost.lose_stream()
    world.wait(KEEP_ALIVE)
    if closed:
        world.close()
    world.wait(passed)
    assert signalled(world, a).stop is stops


def test_round_that_is_too_small_without_the_lost_node_waits_for_another():
    world = RendezvousWorld()
    a, b, lost = complete(world, 3, 3)
    lost.lose_stream()
    world.wait(KEEP_ALIVE)
    assert (a.lost, b.lost, a.waiting) == (0, 0, 0)
    spare = world.agent("node-9", nodes(3, 3))
    spare.join()
    assert (a.lost, a.waiting) == (1, 1)


@pytest.mark.parametrize("informed", [True, False])
def test_lost_node_is_not_forgotten_when_the_coordinator_restarts(informed: bool):
    world = RendezvousWorld()
    a, b, lost = complete(world, 2, 3)
    lost.lose_stream()
    if not informed:
        a.lose_stream(seen=False)
        b.lose_stream(seen=False)
    world.wait(KEEP_ALIVE)
    world.crash()
    for agent in (a, b):
        agent.lost = 0
        agent.connect()
    world.wait(1.0)
    assert (a.lost, b.lost) == (1, 1)


def test_node_that_leaves_while_the_job_goes_on_is_lost_without_its_keep_alive():
    world = RendezvousWorld()
    a, b, leaves = complete(world, 2, 3)
    leaves.leave("the agent ended")
    world.wait(1.0)
    assert (a.lost, b.lost) == (1, 1)


def test_lost_node_that_comes_back_waits_for_the_next_round():
    world = RendezvousWorld()
    a, b, lost = complete(world, 2, 3)
    lost.lose_stream()
    world.wait(KEEP_ALIVE)
    lost.connect()
    assert lost.place is None
    lost.join()
    world.wait(1.0)
    assert (a.lost, a.waiting) == (1, 1)
    for agent in (a, b):
        agent.join()
    assert world.ranks_of(a, b, lost) == [0, 1, 2]
    assert (a.lost, b.lost, lost.lost) == (0, 0, 0)
