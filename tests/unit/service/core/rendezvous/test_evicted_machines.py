"""Evicted machines with several addresses, or with a notice in force."""

from muster.client.save_votes import PREFIX
from muster.service.core.vocabulary.effects import Evicted, NodeDrained, Refused
from muster.service.core.vocabulary.events import DrainNode, EvictNode
from muster.service.core.vocabulary.refusal import Reason
from tests.support.world.core_world import RUN
from tests.support.world.rendezvous_world import RendezvousWorld, formed


def evict(world: RendezvousWorld, node: str) -> object:
    (answer,) = world.ask(EvictNode(world.new_session(), RUN, node, "ann", "bad disk", True))
    return answer


def test_agent_of_the_machine_under_another_address_is_no_spare():
    world = formed("10.0.0.1", "10.0.0.2", "10.1.0.1")
    for node in world.rendezvous:
        node.info = node.info._replace(name="node-2" if node.info.address == "10.0.0.2" else "node-1")
    answer = evict(world, "10.0.0.1")
    assert isinstance(answer, Refused)
    assert answer.refusal.reason is Reason.NO_SPARE


def test_notice_of_an_evicted_node_does_not_stop_the_round_that_forms_without_it():
    """The ranks of the evicted node live on for the seconds that its agent gives them."""
    world = formed("node-0", "node-1", "node-2")
    world.ranks(2, prefix=PREFIX)
    assert evict(world, "node-0") == Evicted()
    world.agents[2].lose_stream()
    world.agents[1].join()
    assert not world.rendezvous.complete
    (answer,) = world.ask(DrainNode(900, "node-0", (RUN,), True, "watcher", "spot", None, "n1"))
    world.agents[2].connect()
    clients = world.ranks(2, prefix=PREFIX, generation=1)
    assert [client.save_asked for client in clients] == [None, None]
    assert answer == NodeDrained(())


def test_notice_of_an_evicted_node_does_not_stop_the_ranks_of_the_other_nodes():
    world = formed("node-0", "node-1", "node-2")
    clients = world.ranks(2, prefix=PREFIX)
    assert evict(world, "node-0") == Evicted()
    world.ask(DrainNode(900, "node-0", (RUN,), True, "watcher", "spot", None, "n1"))
    assert clients[1].save_asked is None
