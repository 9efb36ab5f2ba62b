"""Properties of the rendezvous that no scenario shows; what nodes do and hear is in scenarios/rendezvous."""

import pytest

from muster.service.core.rendezvous.nodes import natural
from muster.service.core.rendezvous.rendezvous import MAX_DEPARTED, ROUND_HISTORY
from muster.service.core.vocabulary.effects import NodeLeft
from muster.service.core.vocabulary.events import CloseRun, Evict, LeaveRendezvous
from muster.service.core.vocabulary.model import NodeInfo
from muster.service.core.vocabulary.records import ForgetRound
from muster.service.core.vocabulary.refusal import Reason
from tests.support.world.core_world import RUN
from tests.support.world.rendezvous_world import LAST_CALL, RendezvousWorld, nodes


@pytest.fixture
def full():
    """Two nodes, a and b, in round 0, which takes no more."""
    world = RendezvousWorld(nodes(2))
    world.several("a", "b")
    assert world.ranks_of(*world.agents) == [0, 1]
    return world


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


@pytest.mark.parametrize("run", [RUN, "another", "", "x" * 10_000])
def test_node_without_a_place_leaves_without_effect(full, run):
    event = LeaveRendezvous(full.new_session(), run, "stranger")
    assert full.ask(event) == [NodeLeft(had_place=False)]
    assert list(full.coordinator.runs) == [RUN]


def test_only_the_last_that_went_are_remembered():
    world = RendezvousWorld(nodes(2))
    for number in range(MAX_DEPARTED + 3):
        world.agent(f"n{number}").leave()
    assert len(world.rendezvous.departed) == MAX_DEPARTED
    assert world.rendezvous.departed[0].info.address == f"n{MAX_DEPARTED + 2}"


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


def test_an_idle_rendezvous_does_not_ask_to_be_woken_again_and_again():
    """A last call that is over, with a node that is lost, leaves nothing to do but to wait for the node."""
    world = RendezvousWorld(nodes(2, 3, keep_alive_timeout=100))
    _, b = world.several("a", "b")
    b.lose_stream()
    world.wait(LAST_CALL + 1)
    deadline = world.coordinator.next_deadline()
    assert deadline is not None
    assert deadline > world.now + 1
