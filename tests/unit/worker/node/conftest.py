from collections.abc import Iterator

import pytest

from muster.client import replicas
from muster.v1 import rendezvous_pb2_grpc
from muster.worker.node import membership as module
from muster.worker.node.membership import NodeMembership
from muster.worker.transport import stream
from tests.support.world.node_wire import Wire
from tests.unit.worker.node.joined_node import CONFIG


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()
    monkeypatch.setattr(module, "open_channel", lambda *_: wire)
    monkeypatch.setattr(stream, "open_channel", lambda *_: wire)
    monkeypatch.setattr(rendezvous_pb2_grpc, "RendezvousServiceStub", lambda channel: channel)
    monkeypatch.setattr(replicas, "FIRST_BACKOFF", 0.001)
    return wire


@pytest.fixture
def node(wire: Wire) -> Iterator[NodeMembership]:
    node = NodeMembership(CONFIG)
    yield node
    wire.answer = None
    node.leave("the test is over")
