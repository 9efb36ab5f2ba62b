"""Which nodes may meet: those that ask for the same number of nodes."""

from collections.abc import Sequence

from muster.service.core.rendezvous import refusals
from muster.service.core.rendezvous.nodes import Node
from muster.service.core.vocabulary.effects import Effects
from muster.service.core.vocabulary.events import JoinRendezvous
from muster.service.core.vocabulary.model import Instant, RendezvousSettings
from muster.service.core.vocabulary.records import AgreementRecord


class Agreement:
    """The settings that a run's nodes last agreed on, and how long they bind after a restart.

    The nodes of a round that forms are not on disk. After a restart any node may come first, also one of
    another job that wants fewer nodes. A round of another size is therefore not complete before the earlier
    nodes have had their keep-alive timeout to come back.

    Args:
        run_id: the run.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._settings: RendezvousSettings | None = None
        """The ones on disk; None before the first node."""
        self._binds_until = float("-inf")

    def restore(self, record: AgreementRecord) -> None:
        """Restore what was on disk."""
        self._settings = record.settings

    def serve(self, now: Instant) -> None:
        """Let restored settings bind, from now."""
        if self._settings is not None:
            self._binds_until = now.monotonic + self._settings.keep_alive_timeout

    def binds_until(self, settings: RendezvousSettings) -> float:
        """Return until when a round with these settings must wait, on the monotonic clock."""
        return float("-inf") if self._agrees(settings) else self._binds_until

    def adopt(self, settings: RendezvousSettings, now: Instant, effects: Effects) -> None:
        """Make the settings of the nodes that are there durable, unless earlier ones bind."""
        if not self._agrees(settings) and now.monotonic >= self._binds_until:
            self._settings = settings
            effects.records.append(AgreementRecord(self._run_id, settings))

    def _agrees(self, settings: RendezvousSettings) -> bool:
        return self._settings is not None and self._settings.size == settings.size


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
