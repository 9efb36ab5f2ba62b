"""A node that an operator has sent away: its agent ends its workers, and never joins again."""

import pytest

from lab.patience import PATIENCE, until
from muster.worker.errors import RefusedError
from muster.worker.node import membership as module
from muster.worker.node.membership import NodeMembership
from tests.support.world.node_wire import Wire, refusal
from tests.unit.worker.node.joined_node import in_round, joining

EVICTED = "NODE_EVICTED"


def test_evicted_node_never_joins_again(node: NodeMembership, wire: Wire, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "HEAD_START", 0.0)
    in_round(node, wire).fail(refusal(EVICTED))
    until(lambda: node.evicted)
    assert node.nodes_waiting == 1
    for _ in range(2):
        with pytest.raises(RefusedError) as caught:
            joining(node).result(PATIENCE)
        assert caught.value.reason == EVICTED
    assert wire.quiet()


def test_other_agents_have_a_head_start(node: NodeMembership, wire: Wire, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "HEAD_START", PATIENCE)
    stream = in_round(node, wire)
    stream.push(nodes_waiting={"count": 2})
    until(lambda: node.nodes_waiting == 2)
    stream.fail(refusal(EVICTED))
    until(lambda: node.evicted)
    assert node.nodes_waiting == 0


def test_node_that_was_evicted_while_it_waited_says_so(node: NodeMembership, wire: Wire):
    place = joining(node)
    wire.stream().wait().fail(refusal(EVICTED))
    with pytest.raises(RefusedError):
        place.result(PATIENCE)
    assert node.evicted
    assert not node.stopped


def test_evicted_node_goodbye_settled(node: NodeMembership, wire: Wire):
    in_round(node, wire).fail(refusal(EVICTED))
    until(lambda: node.evicted)
    node.leave("over")
    assert wire.left == []
