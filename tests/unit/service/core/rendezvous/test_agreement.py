"""Nodes agree on the size of a round. A restart of the coordinator does not let another job replace it."""

import pytest

from muster.service.core.vocabulary.model import RendezvousSettings
from muster.service.core.vocabulary.records import AgreementRecord
from muster.service.core.vocabulary.refusal import Reason
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


def test_settings_do_not_bind_once_all_nodes_have_left(world: RendezvousWorld):
    for agent in forming(world):
        agent.leave()
    assert not world.disk.of_kind(AgreementRecord)
    world.crash()
    other = world.agent("other", nodes(1))
    assert other.rank == 0
    assert on_disk(world) == nodes(1)


def test_settings_of_nodes_that_are_too_few_are_durable_when_earlier_ones_have_had_their_time():
    world = RendezvousWorld()
    earlier = world.agent("earlier", nodes(1))
    assert earlier.rank == 0
    earlier.lose_stream(seen=False)
    world.crash()
    waiting = [world.agent(name, nodes(4)) for name in ("b", "c", "d")]
    assert {agent.reason for agent in waiting} == {Reason.SETTINGS_DIFFER}  # its round is complete
    world.wait(KEEP_ALIVE)
    waiting = [world.agent(name, nodes(4)) for name in ("b", "c", "d")]
    assert on_disk(world) == nodes(4)
    world.wait(1)
    world.crash()
    stray = world.agent("stray", nodes(1))
    for agent in waiting:
        agent.connect()
    world.agent("e", nodes(4))
    assert (stray.reason, world.ranks_of(*waiting)) == (Reason.SETTINGS_DIFFER, [0, 1, 2])


def test_nodes_of_another_size_are_durable_when_the_earlier_ones_do_not_come_back(world: RendezvousWorld):
    forming(world)
    world.crash()
    other = world.agent("other", nodes(3))
    world.agent("brief", nodes(3, join_timeout=5.0))
    world.wait(KEEP_ALIVE)
    assert (on_disk(world), other.place) == (nodes(3), None)


def test_last_call_of_a_stray_node_does_not_count_for_nodes_that_come_back():
    world = RendezvousWorld(nodes(1, 4))
    first = world.agent("a")
    world.wait(1)
    world.crash()
    stray = world.agent("stray", nodes(1, 2, last_call_timeout=1))
    world.wait(10)
    first.connect()
    assert (stray.reason, first.place) == (Reason.SETTINGS_DIFFER, None)
    assert world.ranks_of(first, *world.several("b", "c", "d")) == [0, 1, 2, 3]


def test_longest_keep_alive_timeout_binds():
    world = RendezvousWorld()
    world.agent("a", nodes(3, keep_alive_timeout=1))
    slow = world.agent("b", nodes(3, keep_alive_timeout=60))
    world.wait(1)
    world.crash()
    stray = world.agent("stray", nodes(1))
    world.wait(30)
    assert stray.place is None
    slow.connect()
    assert stray.reason is Reason.SETTINGS_DIFFER


def test_node_that_comes_back_first_does_not_shorten_the_time_of_the_others():
    world = RendezvousWorld()
    first = world.agent("a", nodes(3, keep_alive_timeout=1))
    world.agent("b", nodes(3, keep_alive_timeout=60))
    world.crash()
    first.connect()
    assert on_disk(world).keep_alive_timeout == 60


def test_round_that_waits_for_earlier_nodes_says_so(world: RendezvousWorld):
    forming(world)
    world.crash()
    stray = world.agent("stray", nodes(1, join_timeout=5.0))
    assert stray.standing is not None
    assert "for nodes that had agreed on 4 nodes before the coordinator restarted" in stray.standing.message
    world.wait(5)
    assert stray.refusal is not None
    assert "for nodes that had agreed on 4 nodes" in stray.refusal.message
