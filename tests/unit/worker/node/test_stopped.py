"""What a node of a stopped run knows, on a wire that the test holds in its hands."""

from queue import Queue

import pytest

from lab.patience import PATIENCE, until
from muster.v1 import common_pb2
from muster.v1 import rendezvous_pb2 as pb
from muster.worker.errors import RefusedError
from muster.worker.node.membership import NodeMembership, Place
from tests.support.world.node_wire import BROKEN, Wire, refusal
from tests.unit.worker.node.joined_node import CONFIG, in_round, joining

STOPPED = common_pb2.Stopped(step=9, by="ann", reason="a drain")


def test_node_of_a_stopped_round_hears_of_each_departure(wire: Wire):
    heard: Queue[tuple[Place, int]] = Queue()
    node = NodeMembership(CONFIG, lambda place, gone: heard.put((place, gone)))
    stream = in_round(node, wire)
    stream.push(stopped=pb.RoundStopped(stopped=STOPPED))
    until(lambda: node.stopped)
    stream.push(stopped=pb.RoundStopped(stopped=STOPPED, nodes_gone=1))
    assert heard.get(timeout=PATIENCE) == (Place(0, 0, 2), 1)
    assert heard.empty()
    wire.answer = BROKEN
    assert node.ask_stopped(1)
    wire.answer = None
    node.leave("the test is over")


def test_refused_node_knows_that_the_run_was_stopped(node: NodeMembership, wire: Wire):
    place = joining(node)
    wire.stream().wait().fail(refusal("RUN_STOPPED"))
    with pytest.raises(RefusedError):
        place.result(PATIENCE)
    assert node.stopped


def test_closing_node_learns_that_the_run_was_stopped(node: NodeMembership, wire: Wire):
    wire.answer = pb.CloseResponse(stopped=STOPPED)
    in_round(node, wire)
    node.close("over", 1)
    assert node.stopped
    assert not node.closed


def test_nodes_that_wait_or_are_lost_do_not_interrupt_a_stopped_round(node: NodeMembership, wire: Wire):
    stream = in_round(node, wire)
    stream.push(nodes_waiting=pb.NodesWaiting(count=1, lost=2))
    until(lambda: node.nodes_waiting == 1)
    stream.push(stopped=pb.RoundStopped(stopped=STOPPED))
    until(lambda: node.stopped)
    until(lambda: (node.nodes_waiting, node.nodes_lost) == (0, 0))


def test_node_forgets_the_stop_of_a_run_that_was_closed(node: NodeMembership, wire: Wire):
    in_round(node, wire).push(stopped=pb.RoundStopped(stopped=STOPPED))
    until(lambda: node.stopped)
    wire.answer = pb.CloseResponse(closed=common_pb2.Closed(by="ann"))
    node.close("over", 1)
    assert node.closed
    assert not node.stopped


def test_new_node_that_fails_was_not_in_the_stopped_round(node: NodeMembership, wire: Wire):
    wire.answer = pb.CloseResponse(stopped=STOPPED)
    node.close("over", 1)
    assert not node.stopped


def test_node_asks_whether_the_run_was_stopped(node: NodeMembership, wire: Wire):
    assert not node.ask_stopped(1)
    in_round(node, wire)
    for rendezvous, stopped in ((pb.Rendezvous(), False), (pb.Rendezvous(stopped=STOPPED), True)):
        wire.answer = pb.RendezvousServiceGetResponse(rendezvous=rendezvous)
        assert node.ask_stopped(1) is stopped
    wire.answer = BROKEN
    assert not node.ask_stopped(1)
