"""The eviction of a machine: its agents leave the run for good, and the next round forms without them."""

from typing import NamedTuple

from muster.service.core.checks import Checks
from muster.service.core.rendezvous import refusals
from muster.service.core.rendezvous.nodes import Node
from muster.service.core.run import Run
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.effects import Effects
from muster.service.core.vocabulary.events import EvictNode
from muster.service.core.vocabulary.model import Instant, NodeStanding


class NodeEviction(NamedTuple):
    """The agents that an eviction concerns, and the spares."""

    nodes: list[Node]
    """The agents of the machine."""
    spares: int
    """Connected nodes of other machines that stand by."""


def plan_eviction(run: Run, node_name: str, *, only_if_spare: bool) -> NodeEviction:
    """Return the agents that the eviction of a machine concerns, and the spares.

    Args:
        run: the run.
        node_name: the name or the address of the machine.
        only_if_spare: whether other nodes must stand by for those in the round.

    Raises:
        Refusal: RUN_CLOSED, RUN_STOPPED, NODE_NOT_FOUND or NO_SPARE.
    """
    rendezvous = run.rendezvous
    if run.closed is not None or rendezvous.stopped is not None:
        raise refusals.nothing_to_replace(run.run_id, run.closed, rendezvous.stopped)
    # A machine may have an address for each of its agents.
    names = {node.info.node_name for node in rendezvous if node_name in (node.info.name, node.info.address)}
    nodes = [node for node in rendezvous if node.info.node_name in names]
    if not nodes:
        raise refusals.node_not_found(run.run_id, node_name, rendezvous)
    spares = sum(
        node.session is not None and node.info.node_name not in names
        for node in rendezvous.of(NodeStanding.REDUNDANT)
    )
    evicted = sum(node.standing is NodeStanding.PARTICIPANT for node in nodes)
    if only_if_spare and spares < evicted:
        raise refusals.no_spare(run.run_id, node_name, evicted, spares)
    return NodeEviction(nodes, spares)


def evict_node(run: Run, event: EvictNode, checks: Checks, now: Instant, effects: Effects) -> None:
    """Evict the agents of a machine.

    Raises:
        Refusal: INVALID_ARGUMENT, or as :func:`plan_eviction`.
    """
    checks.name("node_name", event.node_name)
    checks.name("by", event.by)
    nodes = plan_eviction(run, event.node_name, only_if_spare=event.only_if_spare).nodes
    run.rendezvous.evict(nodes, report.requested(event.by, event.reason), now, effects)
    run.write_record(now, effects)
