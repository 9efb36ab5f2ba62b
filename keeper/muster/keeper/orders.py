"""Decides what a keeper does next: a pure function of its orders, its files, and its running actions."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.manifest import MANIFEST
from muster.keeper.vocabulary import Holding, Order, Orders


@dataclass(frozen=True, slots=True)
class Kept:
    """What a keeper has of one attempt."""

    parts: Mapping[int, frozenset[str]] | None = None
    """By rank, the names of the files in its part; None: the head is not here, or not verified."""
    manifest_digest: bytes = b""
    verified: frozenset[str] = frozenset()
    """The files that are here, verified and on the disk."""
    unsynced: frozenset[str] = frozenset()
    """The files that are here and verified, and may be lost if the node loses its power now."""
    unverified: frozenset[str] = frozenset()
    """The files that are here, and have not been verified yet."""
    persisted: frozenset[int] = frozenset()
    """The ranks whose parts it has copied to shared storage."""
    persisted_as: str = ""
    """Where it has committed the checkpoint in shared storage."""

    def lacks(self, rank: int) -> frozenset[str]:
        """Return the files of a rank's part that are not ``verified``; the head must be here."""
        assert self.parts is not None
        return self.parts.get(rank, frozenset()) - self.verified

    def holds(self, rank: int) -> bool:
        """Return whether a rank's part is here, verified and on the disk."""
        return self.parts is not None and not self.lacks(rank)


@dataclass(frozen=True, slots=True)
class GetHead:
    """Verify the manifest and torch's metadata, or get them from a source."""

    attempt: SaveAttempt


@dataclass(frozen=True, slots=True)
class VerifyFile:
    """Verify a file that is here, and put it on the disk."""

    attempt: SaveAttempt
    name: str


@dataclass(frozen=True, slots=True)
class SyncFile:
    """Put a file that was fetched on the disk. Ranks read it before; it counts as held only then."""

    attempt: SaveAttempt
    name: str


@dataclass(frozen=True, slots=True)
class FetchFile:
    """Fetch a file from a source."""

    attempt: SaveAttempt
    name: str
    rank: int


@dataclass(frozen=True, slots=True)
class PersistPart:
    """Copy a rank's part to shared storage."""

    attempt: SaveAttempt
    rank: int


@dataclass(frozen=True, slots=True)
class CommitPersisted:
    """Commit a checkpoint in shared storage."""

    attempt: SaveAttempt


@dataclass(frozen=True, slots=True)
class DeleteAttempt:
    """Delete the files of an attempt."""

    attempt: SaveAttempt


Action: TypeAlias = (
    GetHead | VerifyFile | SyncFile | FetchFile | PersistPart | CommitPersisted | DeleteAttempt
)


@dataclass(frozen=True, slots=True)
class Situation:
    """All that the decision depends on."""

    orders: Orders
    kept: Mapping[SaveAttempt, Kept] = field(default_factory=dict)
    """By attempt, for all whose folders are here."""
    busy: Collection[Action] = frozenset()
    """The actions that are running, or have failed and wait for their next try."""


def decide(now: Situation) -> Sequence[Action]:
    """Return the actions that are to begin, the most urgent first.

    Deletions come first, because they make room. Heads are next: nothing can be verified without them, and
    others wait for them. Then the newest checkpoint is completed, then older ones. Persisting comes last.
    """
    deletions = [DeleteAttempt(attempt) for attempt in sorted(now.kept) if is_forgotten(now.orders, attempt)]
    copies: list[Action] = []
    persisting: list[Action] = []
    for attempt, order in sorted(now.orders.orders.items(), reverse=True):
        kept = now.kept.get(attempt, Kept())
        copies += _copies(order, kept)
        persisting += _persisting(order, kept)
    # The oldest is persisted first: its commit must not come after a newer one's.
    heads = [action for action in copies if isinstance(action, GetHead)]
    actions = [*deletions, *heads, *copies, *sorted(persisting, key=lambda action: action.attempt)]
    return [action for action in dict.fromkeys(actions) if action not in now.busy]


def may_be_verified(orders: Orders, kept: Mapping[SaveAttempt, Kept], failed: Collection[Action]) -> bool:
    """Return whether a file that is here of an ordered checkpoint may yet be verified, by what is known now.

    Args:
        orders: the orders.
        kept: what is here, by attempt.
        failed: the actions that have failed often enough.
    """
    for attempt, order in orders.orders.items():
        one = kept.get(attempt, Kept())
        if one.parts is None:
            if _needs_head(order, one) and GetHead(attempt) not in failed:
                return True
        elif any(action not in failed for action in _unfinished(attempt, one, _in_sources(order))):
            return True
    return False


def is_forgotten(orders: Orders, attempt: SaveAttempt) -> bool:
    """Return whether the files of an attempt are to be deleted."""
    return attempt not in orders.orders and attempt < orders.forget_before


def wanted_ranks(order: Order) -> frozenset[int]:
    """Return the ranks whose parts must be here: to be held, or to be persisted."""
    return order.ranks | order.persist


def _copies(order: Order, kept: Kept) -> list[Action]:
    wanted = wanted_ranks(order)
    attempt = order.checkpoint.attempt
    if kept.parts is None:
        return [GetHead(attempt)] if wanted or order.commit or _needs_head(order, kept) else []
    lacking = [(name, rank) for rank in sorted(wanted) for name in sorted(kept.lacks(rank))]
    here = [VerifyFile(attempt, name) for name, _ in lacking if name in kept.unverified]
    known = kept.unverified | kept.unsynced
    # Right after a save, some keepers have not reported their parts yet.
    sources = _in_sources(order)
    fetches = [
        FetchFile(attempt, name, rank) for name, rank in lacking if rank in sources and name not in known
    ]
    return [*here, *fetches, *_unfinished(attempt, kept)]


def _needs_head(order: Order, kept: Kept) -> bool:
    """Return whether files are here that may be verified with a head from this disk or from a source.

    What is here may be the only copy: its node may have died before the head came from another one.
    """
    return bool(kept.unverified and (order.sources or MANIFEST in kept.unverified))


def _in_sources(order: Order) -> frozenset[int]:
    """Return the ranks with a part at a source."""
    return frozenset[int]().union(*(source.ranks for source in order.sources))


def _unfinished(
    attempt: SaveAttempt, kept: Kept, elsewhere: frozenset[int] = frozenset()
) -> Sequence[Action]:
    """Return the actions after which the files that are here count as held; the head must be here.

    Args:
        attempt: the attempt.
        kept: what is here of it.
        elsewhere: ranks with a part at another keeper. Syncs of copies of these are left out.
    """
    assert kept.parts is not None
    names = frozenset[str]().union(*kept.parts.values())
    alone = frozenset[str]().union(*(part for rank, part in kept.parts.items() if rank not in elsewhere))
    return [
        *(SyncFile(attempt, name) for name in sorted(alone & kept.unsynced)),
        *(VerifyFile(attempt, name) for name in sorted(names & kept.unverified)),
    ]


def _persisting(order: Order, kept: Kept) -> list[Action]:
    if not order.checkpoint.persist_to or kept.parts is None or kept.persisted_as:
        return []
    attempt = order.checkpoint.attempt
    if order.commit:
        return [CommitPersisted(attempt)]
    return [PersistPart(attempt, rank) for rank in sorted(order.persist - kept.persisted) if kept.holds(rank)]


def holding(attempt: SaveAttempt, kept: Kept, order: Order | None) -> Holding | None:
    """Return what to report of an attempt; None if its head is not verified.

    Args:
        attempt: the attempt.
        kept: what is here of it.
        order: the order about it; None: no order names it.
    """
    if kept.parts is None:
        return None
    candidates = {rank for rank, names in kept.parts.items() if names}
    candidates |= wanted_ranks(order) if order is not None else frozenset()
    ranks = frozenset(rank for rank in candidates if kept.holds(rank))
    return Holding(attempt, kept.manifest_digest, ranks, kept.persisted, kept.persisted_as)
