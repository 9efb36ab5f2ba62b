"""Which nodes may meet: those that ask for the same number of nodes."""

import math
from collections.abc import Iterable, Sequence, Sized

from muster.service.core.rendezvous import refusals
from muster.service.core.rendezvous.nodes import Node
from muster.service.core.vocabulary.effects import Effects
from muster.service.core.vocabulary.events import JoinRendezvous
from muster.service.core.vocabulary.model import Instant, RendezvousSettings
from muster.service.core.vocabulary.records import AgreementRecord, ForgetAgreement


class Agreement:
    """The settings of the nodes that have a place, as on disk, and how long they bind after a restart.

    The nodes of a round that forms are not on disk. After a restart any node may come first, also one of
    another job that wants fewer nodes. A round of another size is therefore not complete before the earlier
    nodes have had the longest of their keep-alive timeouts to come back.

    Args:
        run_id: the run.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._settings: RendezvousSettings | None = None
        """The ones on disk, with the longest keep-alive timeout; None: no node has a place."""
        self.binds_until = math.inf
        """Until when earlier nodes may come back after a restart, on the monotonic clock; infinity: none."""

    def restore(self, record: AgreementRecord) -> None:
        """Restore what was on disk."""
        self._settings = record.settings

    def serve(self, now: Instant) -> None:
        """Let restored settings bind, from now."""
        if self._settings is not None:
            self.binds_until = now.monotonic + self._settings.keep_alive_timeout

    def earlier(self, settings: RendezvousSettings) -> RendezvousSettings | None:
        """Return the settings of earlier nodes that a round with these settings must wait for, if any."""
        kept = self._settings
        return kept if self._binds and kept is not None and kept.size != settings.size else None

    def earliest(self, settings: RendezvousSettings) -> float:
        """Return when a round with these settings may be complete, on the monotonic clock."""
        return -math.inf if self.earlier(settings) is None else self.binds_until

    def end_binding(self, nodes: Iterable[Node], now: Instant, effects: Effects) -> None:
        """When the earlier nodes have had their time, take over the settings of those that have a place."""
        if now.monotonic >= self.binds_until:
            self.binds_until = math.inf
            for index, node in enumerate(nodes):
                self.add(node.settings, effects, is_alone=index == 0)

    def add(self, settings: RendezvousSettings, effects: Effects, *, is_alone: bool) -> None:
        """Make durable what a node asks for.

        Args:
            settings: the node's.
            effects: receives the record.
            is_alone: whether no other node has a place.
        """
        kept = self._settings
        if kept is not None and kept.size == settings.size:
            if self._binds or not is_alone:  # Other nodes ask for the same, perhaps with a longer timeout.
                settings = max(kept, settings, key=lambda one: one.keep_alive_timeout)
        elif self._binds:
            return
        if settings != kept:
            self._settings = settings
            effects.records.append(AgreementRecord(self._run_id, settings))

    def end_without(self, nodes: Sized, effects: Effects) -> None:
        """Forget the settings if no node has a place any more."""
        if not len(nodes) and self._settings is not None and not self._binds:
            self._settings = None
            effects.records.append(ForgetAgreement(self._run_id))

    @property
    def _binds(self) -> bool:
        return self.binds_until < math.inf


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
