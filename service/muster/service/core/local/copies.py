"""One local checkpoint, and the connected keepers that have each of its parts."""

from muster.service.core.vocabulary.local import Attempt, Holding, Level, LocalCheckpoint, Permit
from muster.service.core.vocabulary.local import LocalCheckpointRecord as Record


class Copies:
    """The copies of one checkpoint.

    Args:
        record: the checkpoint.
        is_restored: whether an earlier coordinator made it.
    """

    def __init__(self, record: Record, *, is_restored: bool = False) -> None:
        self.record = record
        self.is_restored = is_restored
        self.holders: list[set[str]] = [set() for _ in range(record.checkpoint.world_size)]
        """By rank: the ids of the connected keepers that have its part."""
        self.persisted: set[int] = set()
        """The ranks whose parts are in shared storage."""
        self.is_given_up = False
        """Whether nobody tries to persist it any more."""
        self.is_fresh = False
        """Whether the others can rely on the keeper that had the manifest at the commit: it has
        been connected ever since, and no decision waits."""
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

    def some_holders(self) -> tuple[str, ...]:
        """Return the ids of one or two connected keepers with parts, which have the manifest as well."""
        if self._missing == len(self.holders):
            return ()
        first = next(min(holders) for holders in self.holders if holders)
        last = next(max(holders) for holders in reversed(self.holders) if holders)
        return tuple(dict.fromkeys((first, last)))

    def only_copies(self) -> set[str]:
        """Return keepers that hold the only copy of some part."""
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
