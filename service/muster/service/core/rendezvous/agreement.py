"""Which nodes may meet: those that ask for the same number of nodes. A pure function."""

from collections.abc import Sequence

from muster.service.core.rendezvous import refusals
from muster.service.core.rendezvous.nodes import Node
from muster.service.core.vocabulary.events import JoinRendezvous
from muster.service.core.vocabulary.model import RendezvousSettings


def nodes_that_disagree(
    ask: JoinRendezvous,
    joined_at: float,
    others: Sequence[Node],
    agreed: RendezvousSettings | None,
    *,
    complete: bool,
) -> Sequence[Node]:
    """Return the nodes that give up their places, because a node that asked earlier wants another number.

    The settings of the node that asked first bind, perhaps under an earlier coordinator: a round that forms
    is not on disk, and after a restart any node may come first. A node with a lost stream may come back
    within its keep-alive timeout, so its settings still count.

    Args:
        ask: the join of the node.
        joined_at: when it started to wait, on the monotonic clock.
        others: the other nodes with a place.
        agreed: their settings.
        complete: whether their round is complete.

    Raises:
        Refusal: SETTINGS_DIFFER: the node asked later, or their round is complete.
    """
    if not others or agreed is None or agreed.size == ask.settings.size:
        return ()
    if complete or any(other.joined_at <= joined_at for other in others):
        raise refusals.settings_differ(ask, agreed, list(others))
    return others
