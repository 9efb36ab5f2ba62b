"""Nodes agree on the size of a round. A restart of the coordinator does not let another job replace it."""

import pytest

from muster.service.core.vocabulary.model import RendezvousSettings
from muster.service.core.vocabulary.records import AgreementRecord
from muster.service.core.vocabulary.refusal import Reason
from tests.support.world.core_world import RUN
from tests.support.world.rendezvous_world import KEEP_ALIVE, Agent, RendezvousWorld, nodes


@pytest.fixture
def world() -> RendezvousWorld:
    return RendezvousWorld(nodes(4))


def forming(world: RendezvousWorld) -> list[Agent]:
    """Three of four nodes wait for the fourth, for a second."""
    agents = world.several("a", "b", "c")
    world.wait(1)
    return agents


def on_disk(world: RendezvousWorld) -> RendezvousSettings:
    (record,) = (one for one in world.disk.records() if isinstance(one, AgreementRecord))
    return record.settings


def test_node_of_another_job_that_comes_first_after_a_restart_gets_no_round(world: RendezvousWorld):
    waiting = forming(world)
    world.crash()
    stray = world.agent("stray", nodes(1))
    assert stray.place is None
    world.wait(KEEP_ALIVE - 1)
    assert stray.place is None
    for agent in waiting:
        agent.connect()
    assert stray.reason is Reason.SETTINGS_DIFFER
    world.agent("d")
    assert world.ranks_of(*waiting) == [0, 1, 2]


def test_two_restarts_do_not_replace_the_agreed_settings(world: RendezvousWorld):
    waiting = forming(world)
    for _ in range(2):
        world.crash()
        stray = world.agent("stray", nodes(1))
        assert stray.place is None
        assert on_disk(world) == nodes(4)
    for agent in waiting:
        agent.connect()
    world.agent("d")
    assert world.ranks_of(*waiting) == [0, 1, 2]


def test_job_of_another_size_gets_its_round_after_the_keep_alive_timeout(world: RendezvousWorld):
    forming(world)
    world.crash()
    other = world.agent("other", nodes(1))
    world.wait(KEEP_ALIVE)
    assert other.rank == 0
    assert on_disk(world) == nodes(1)


def test_round_of_the_agreed_size_does_not_wait_after_a_restart(world: RendezvousWorld):
    waiting = forming(world)
    world.crash()
    for agent in waiting:
        agent.connect()
    assert world.agent("d").rank == 3


def test_agreed_settings_are_written_once(world: RendezvousWorld):
    (*_, last) = forming(world)
    assert on_disk(world) == nodes(4)
    last.join()
    assert not [one for one in world.last.records if isinstance(one, AgreementRecord)]


def test_job_of_another_size_replaces_the_agreed_settings_once_all_have_left(world: RendezvousWorld):
    for agent in forming(world):
        agent.leave()
    other = world.agent("other", nodes(1))
    assert other.rank == 0
    assert (on_disk(world), RUN in world.coordinator.runs) == (nodes(1), True)
