"""The rounds of a rendezvous as table rows: the current one, and those that are over."""

from collections.abc import Hashable
from dataclasses import dataclass

from muster.service.core.vocabulary import report
from muster.service.formatting.cells import NOTHING, duration
from muster.service.wire import node_from_pb
from muster.v1 import rendezvous_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRow:
    """One round. It has no ages, so two rows differ only if the round changed."""

    round: int
    state: str
    """``FORMING``, ``COMPLETE``, ``STOPPED`` and ``CLOSED`` (the last round of such a run) or ``OVER``."""
    nodes: str
    """While it forms: nodes that joined, of the maximum. Then: nodes that are still in it, of its size."""
    waiting: str = NOTHING
    standing_by: str = NOTHING
    joined_in: str = NOTHING
    completed_at: str = NOTHING
    who: str = NOTHING
    copies: str = NOTHING
    """The nodes that get copies of each node's parts of local checkpoints."""


def rounds_of(rendezvous: rendezvous_pb2.Rendezvous, copies: str = "") -> list[RoundRow]:
    """Return all known rounds, newest first.

    Args:
        rendezvous: the rounds.
        copies: where copies go now, which is shown with the current round if that is complete.
    """
    current = [_current(rendezvous, copies)] if rendezvous.max_nodes else []
    over = [
        RoundRow(
            round=one.round,
            state="OVER",
            nodes=str(one.world_size),
            joined_in=duration(one.join_ms),
            completed_at=one.completed_at.ToJsonString(),
        )
        for one in rendezvous.rounds
        if not _is_current(one, rendezvous)
    ]
    return current + over


def current_state(rendezvous: rendezvous_pb2.Rendezvous) -> str:
    """Return the state of the current round."""
    if rendezvous.HasField("closed"):
        return "CLOSED"
    if rendezvous.HasField("stopped"):
        return "STOPPED"
    return "COMPLETE" if rendezvous.complete else "FORMING"


def round_key(row: RoundRow) -> Hashable:
    """Return what identifies a row at the next poll."""
    return row.round


def _current(rendezvous: rendezvous_pb2.Rendezvous, copies: str) -> RoundRow:
    inside = _nodes(rendezvous, rendezvous_pb2.NODE_STANDING_PARTICIPANT)
    completed = next((one for one in rendezvous.rounds if _is_current(one, rendezvous)), None)
    size = completed.world_size if completed is not None else rendezvous.max_nodes
    return RoundRow(
        round=rendezvous.round,
        state=current_state(rendezvous),
        nodes=f"{len(inside)}/{size}",
        waiting=str(len(_nodes(rendezvous, rendezvous_pb2.NODE_STANDING_WAITING))),
        standing_by=str(len(_nodes(rendezvous, rendezvous_pb2.NODE_STANDING_REDUNDANT))),
        joined_in=duration(completed.join_ms) if completed is not None else NOTHING,
        completed_at=completed.completed_at.ToJsonString() if completed is not None else NOTHING,
        who=report.node_names([node_from_pb(view.node) for view in inside]) or NOTHING,
        copies=(copies if rendezvous.complete else "") or NOTHING,
    )


def _is_current(one: rendezvous_pb2.Round, rendezvous: rendezvous_pb2.Rendezvous) -> bool:
    return rendezvous.complete and one.round == rendezvous.round


def _nodes(
    rendezvous: rendezvous_pb2.Rendezvous, standing: rendezvous_pb2.NodeStanding.ValueType
) -> list[rendezvous_pb2.NodeView]:
    return [view for view in rendezvous.nodes if view.standing == standing]
