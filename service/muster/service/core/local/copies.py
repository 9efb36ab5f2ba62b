"""One local checkpoint, and the connected keepers that have each of its parts."""

from collections.abc import Iterable, Sequence

from muster.service.core.vocabulary.local import Attempt, Holding, Level, LocalCheckpoint, Permit
from muster.service.core.vocabulary.local import LocalCheckpointRecord as Record


class Copies:
    """The copies of one checkpoint.

    Args:
        record: the checkpoint.
        since: when it was made, or restored, on the monotonic clock.
        is_restored: whether an earlier coordinator made it.
    """

    def __init__(self, record: Record, since: float, *, is_restored: bool = False) -> None:
        self.record = record
        self.since = since
        self.is_restored = is_restored
        self.holders: list[set[str]] = [set() for _ in range(record.checkpoint.world_size)]
        """By rank: the ids of the connected keepers that have its part."""
        self.persisted: set[int] = set()
        """The ranks whose parts are in shared storage."""
        self.is_given_up = False
        """Whether nobody tries to persist it any more."""
        self._missing = record.checkpoint.world_size
        self._short = record.checkpoint.world_size
        """The number of ranks whose parts are on fewer nodes than was asked for."""

    @property
    def checkpoint(self) -> LocalCheckpoint:
        """What it is."""
        return self.record.checkpoint

    @property
    def attempt(self) -> Attempt:
        """The attempt that made it."""
        return self.record.checkpoint.attempt

    @property
    def level(self) -> Level:
        """How safe it is."""
        return self.record.level

    @property
    def is_wanted_in_shared_storage(self) -> bool:
        """Whether it is to be persisted, and is not yet."""
        return (
            bool(self.checkpoint.persist_to)
            and self.level < Level.PERSISTED
            and self.record.permit is not Permit.WITHDRAWN
            and not self.is_given_up
            and not self.is_in_shared_storage_alone
        )

    @property
    def is_in_shared_storage_alone(self) -> bool:
        """Whether the ranks wrote it to shared storage themselves. No keeper has parts of it."""
        return not self.record.keeper_id

    @property
    def is_unsettled(self) -> bool:
        """Whether it may be in shared storage, and that is not known."""
        return self.record.permit is not Permit.NONE and self.level < Level.PERSISTED

    @property
    def is_whole(self) -> bool:
        """Whether a connected keeper has each part."""
        return self._missing == 0

    @property
    def has_all_copies(self) -> bool:
        """Whether each part is on as many connected nodes as was asked for."""
        return self._short == 0

    def missing(self) -> list[int]:
        """Return the ranks whose parts no connected keeper has."""
        return [rank for rank, holders in enumerate(self.holders) if not holders]

    def only_copies(self) -> set[str]:
        """Return the keepers of which each alone has a part."""
        return {holder for holders in self.holders if len(holders) == 1 for holder in holders}

    def counts(self, holding: Holding | None) -> frozenset[int]:
        """Return the ranks whose parts a keeper has of this checkpoint, by what it reports."""
        if holding is None or holding.manifest_digest != self.checkpoint.manifest_digest:
            return frozenset()
        return frozenset(rank for rank in holding.ranks if 0 <= rank < self.checkpoint.world_size)

    def change(self, keeper_id: str, before: Holding | None, after: Holding | None) -> None:
        """Count what a keeper has now instead of what it had before.

        Args:
            keeper_id: its id.
            before: what it had; None: nothing, or it was not connected.
            after: what it has; None: nothing, or it is not connected.
        """
        had, has, wanted = self.counts(before), self.counts(after), 1 + self.checkpoint.replicas
        for rank in had - has:
            holders = self.holders[rank]
            holders.discard(keeper_id)
            self._missing += not holders
            self._short += len(holders) == wanted - 1
        for rank in has - had:
            holders = self.holders[rank]
            self._missing -= not holders
            holders.add(keeper_id)
            self._short -= len(holders) == wanted
        if after is not None and after.manifest_digest == self.checkpoint.manifest_digest:
            self.persisted |= {
                rank for rank in after.persisted_ranks if 0 <= rank < self.checkpoint.world_size
            }

    @property
    def can_be_persisted(self) -> bool:
        """Whether a connected keeper has each part that is not in shared storage, and one can commit it."""
        return any(self.holders) and all(rank in self.persisted for rank in self.missing())

    @property
    def is_all_persisted(self) -> bool:
        """Whether all parts are in shared storage."""
        return len(self.persisted) == self.checkpoint.world_size


def newest_whole(copies: Iterable[Copies]) -> Copies | None:
    """Return the newest whole checkpoint, of checkpoints that are sorted from the oldest to the newest."""
    found = None
    for one in copies:
        if one.is_whole:
            found = one
    return found


def newest_persisted(copies: Iterable[Copies]) -> Copies | None:
    """Return the newest checkpoint in shared storage, of checkpoints from the oldest to the newest."""
    found = None
    for one in copies:
        if one.level is Level.PERSISTED:
            found = one
    return found


def unsettled(copies: Sequence[Copies], after: Attempt | None = None) -> list[Copies]:
    """Return the checkpoints that may be in shared storage, from the newest to the oldest.

    An older one than the newest there does not count: it was settled before that one was committed.

    Args:
        copies: all checkpoints, from the oldest to the newest.
        after: an attempt; only later ones are returned. None: all.
    """
    persisted = newest_persisted(copies)
    floor = max(after or Attempt(-1, -1), persisted.attempt if persisted is not None else Attempt(-1, -1))
    return [one for one in reversed(copies) if one.is_unsettled and one.attempt > floor]


def unsettled_before(copies: Sequence[Copies], attempt: Attempt) -> tuple[LocalCheckpoint, ...]:
    """Return the older checkpoints that must be settled before this one is committed in shared storage."""
    return tuple(one.checkpoint for one in unsettled(copies) if one.attempt < attempt)


KEPT = 2
"""Checkpoints that are kept once they are as safe as asked for."""
MOST_KEPT = 6
"""Checkpoints that are kept at most beside the newest whole one, however far behind their copies are."""


def surplus(copies: Sequence[Copies], *, is_alone: bool = False) -> list[Copies]:
    """Return the checkpoints that need not be kept.

    The newest ``KEPT`` that are safe are kept, and all newer ones. So are the one that is being persisted,
    the newest whole one, and the newest one in shared storage if it is newer than that. A restored one is
    kept until a newer one is whole, because the keepers with its parts may not be back yet.

    Args:
        copies: all checkpoints, from the oldest to the newest.
        is_alone: whether the run has one node, where no copies are to be waited for.
    """
    kept: set[Attempt] = set()
    safe = 0
    for number, one in enumerate(reversed(copies)):
        if safe < KEPT and number < MOST_KEPT:
            kept.add(one.attempt)
        safe += one.is_whole if is_alone and not one.is_in_shared_storage_alone else _is_safe(one)
    whole, persisted = newest_whole(copies), newest_persisted(copies)
    for one in copies:
        is_last_resort = whole is None or one.attempt >= whole.attempt
        if is_last_resort and (one is whole or one is persisted or one.is_restored):
            kept.add(one.attempt)
    if (persisting := next_to_persist(copies)) is not None:
        kept.add(persisting.attempt)
    kept.update(one.attempt for one in unsettled(copies))
    return [one for one in copies if one.attempt not in kept]


def _is_safe(one: Copies) -> bool:
    """Whether a checkpoint has all the copies that were asked for, or is in shared storage alone."""
    if one.is_in_shared_storage_alone:
        return one.level is Level.PERSISTED
    wanted = Level.REPLICATED if one.checkpoint.replicas else Level.LOCAL
    return one.level >= wanted and one.is_whole


def next_to_persist(copies: Sequence[Copies]) -> Copies | None:
    """Return the oldest of the checkpoints that are to be persisted and can be.

    Shared storage does not go back: one that is older than the newest one there is not persisted any more.

    Args:
        copies: all checkpoints, from the oldest to the newest.
    """
    persisted = newest_persisted(copies)
    ahead = next((one for one in unsettled(copies) if not one.is_wanted_in_shared_storage), None)
    for one in copies:
        if any(other is not None and one.attempt < other.attempt for other in (persisted, ahead)):
            continue
        if one.is_wanted_in_shared_storage and one.can_be_persisted:
            return one
    return None
