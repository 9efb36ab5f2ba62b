"""A node of the SDK that joins a round on the wire of a test."""

from concurrent.futures import Future

from lab.patience import PATIENCE
from muster.worker.node.membership import NodeConfig, NodeMembership, Place
from tests.support.rendezvous_runs import in_thread
from tests.support.world.node_wire import Stream, Wire

CONFIG = NodeConfig(
    endpoint="there:1",
    run_id="job",
    address="node-0",
    min_nodes=2,
    max_nodes=4,
    join_timeout=20,
    last_call_timeout=0.5,
    keep_alive_timeout=3,
    connect_timeout=20,
    call_timeout=1,
)


def joining(node: NodeMembership) -> Future[object]:
    return in_thread(node.join)


def in_round(node: NodeMembership, wire: Wire) -> Stream:
    place = joining(node)
    stream = wire.stream().complete()
    assert place.result(PATIENCE) == Place(0, 0, 2)
    return stream
