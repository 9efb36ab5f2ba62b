"""What people are told of a rendezvous."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from muster.service.core.rendezvous.agreement import Agreement
from muster.service.core.rendezvous.nodes import Departed, Node
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.model import Instant, NodeStanding, RendezvousSettings


class Nodes(Protocol):
    """A rendezvous, as reports need it."""

    run_id: str
    round: int
    complete: bool
    settings: RendezvousSettings | None
    agreement: Agreement

    @property
    def departed(self) -> Iterable[Departed]:
        """The last departed nodes, newest first."""

    def __iter__(self) -> Iterator[Node]: ...

    def of(self, standing: NodeStanding) -> Sequence[Node]:
        """Return the nodes with a standing."""


def state(nodes: Nodes) -> str:
    """Return the state of a rendezvous, in words."""
    if nodes.settings is None:
        return report.no_rendezvous(nodes.run_id)
    participants = len(nodes.of(NodeStanding.PARTICIPANT))
    if nodes.complete:
        waiting, redundant = len(nodes.of(NodeStanding.WAITING)), len(nodes.of(NodeStanding.REDUNDANT))
        return report.round_runs(nodes.run_id, nodes.round, participants, waiting, redundant)
    forms = report.round_forms(nodes.run_id, nodes.round, participants, nodes.settings)
    return forms + report.earlier_nodes(nodes.agreement.earlier(nodes.settings))


def timeout_report(nodes: Nodes, late: Node, now: Instant) -> str:
    """Return which round a node waited for, and with which other nodes."""
    others = [n.info for n in nodes if n is not late and n.standing is late.standing]
    others += [one.info for one in nodes.departed if one.timed_out_just_now(nodes.round, now.monotonic)]
    assert nodes.settings is not None
    line = report.rendezvous_timed_out(
        nodes.run_id,
        nodes.round,
        late.settings.join_timeout,
        [late.info, *others],
        nodes.settings,
        running=len(nodes.of(NodeStanding.PARTICIPANT)) if nodes.complete else None,
    )
    return line + report.earlier_nodes(nodes.agreement.earlier(nodes.settings))


def nodes_gone(nodes: Nodes, now: Instant) -> str:
    """Return which nodes departed before, and why."""
    return report.nodes_gone(
        [
            (one.info, one.round, one.reason, now.monotonic - one.at)
            for one in nodes.departed
            if not one.timed_out_just_now(nodes.round, now.monotonic)
        ]
    )
