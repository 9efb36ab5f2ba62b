"""What people see of a run's local checkpoints and keepers."""

from dataclasses import dataclass

from muster.service.core.local.copies import Copies
from muster.service.core.local.keepers import Keeper
from muster.service.core.local.selection import newest_persisted, next_to_persist
from muster.service.core.local.tier import LocalTier
from muster.service.core.vocabulary.local import (
    Disk,
    Holding,
    KeeperInfo,
    Level,
    LocalCheckpoint,
    Transfer,
)
from muster.service.core.vocabulary.model import Instant
from muster.service.core.vocabulary.report import ranges


@dataclass(frozen=True, slots=True)
class LocalCheckpointView:
    """One local checkpoint, for people."""

    checkpoint: LocalCheckpoint
    level: Level
    pending: str
    """Why it does not have the next level; empty: it has all that was asked for."""
    missing_ranks: tuple[int, ...]
    """The ranks whose parts no connected keeper has."""
    only_copies: tuple[str, ...]
    """The keepers of which each alone has a part."""
    age: float
    """Seconds since it was made, by the wall clock."""
    persisted_as: str


@dataclass(frozen=True, slots=True)
class KeeperView:
    """One keeper, for people."""

    info: KeeperInfo
    connected: bool
    ranks: tuple[int, ...]
    copies_to: tuple[str, ...]
    disk: Disk
    holdings: tuple[Holding, ...]
    """Newest first."""
    transfers: tuple[Transfer, ...] = ()
    """What it has fetched lately from other keepers."""


@dataclass(frozen=True, slots=True)
class LocalTierView:
    """All of a run's local tier, for people."""

    checkpoints: tuple[LocalCheckpointView, ...]
    """Newest first."""
    keepers: tuple[KeeperView, ...]
    """By their ids."""
    recovery: str
    """The last decision, in words; empty: there was none."""


def local_tier(tier: LocalTier, now: Instant) -> LocalTierView:
    """Return what people see of a run's local checkpoints."""
    copies = tier.copies
    persisting = next_to_persist(copies)
    return LocalTierView(
        tuple(_checkpoint(tier, one, persisting, now) for one in reversed(copies)),
        tuple(_keeper(tier, one) for one in sorted(tier.keepers, key=lambda one: one.info.id)),
        _recovery(tier),
    )


def _checkpoint(tier: LocalTier, one: Copies, persisting: Copies | None, now: Instant) -> LocalCheckpointView:
    return LocalCheckpointView(
        one.checkpoint,
        one.level,
        _pending(tier, one, persisting),
        tuple(one.missing()),
        tuple(sorted(one.only_copies())),
        max(0.0, now.wall - one.record.made_at),
        one.record.persisted_as,
    )


def _pending(tier: LocalTier, one: Copies, persisting: Copies | None) -> str:
    if one.is_in_shared_storage_alone:
        return "" if one.level is Level.PERSISTED else "the ranks have not committed it in shared storage"
    if one.level < Level.REPLICATED and one.checkpoint.replicas:
        nodes, wanted = len(tier.keepers.connected()), one.checkpoint.replicas
        if nodes <= wanted:
            need = "1 copy needs" if wanted == 1 else f"{wanted} copies need"
            return f"{need} {wanted + 1} nodes, and there {'is' if nodes == 1 else 'are'} {nodes}"
        short = [rank for rank, holders in enumerate(one.holders) if len(holders) <= one.checkpoint.replicas]
        if short:
            return f"parts of ranks {ranges(short[:20])} have too few copies"
        return "the copies are in too few failure domains"
    if one.level < Level.PERSISTED and one.checkpoint.persist_to:
        persisted = newest_persisted(tier.copies)
        if persisted is not None and persisted.attempt > one.attempt:
            return "is not persisted, because a later checkpoint is in shared storage"
        if one.is_given_up:
            return "is not persisted, because shared storage took nothing of it for too long"
        if one is not persisting:
            return "waits for an earlier checkpoint to be persisted"
        return f"parts of {len(one.persisted)} of {one.checkpoint.world_size} ranks are in shared storage"
    return ""


def _keeper(tier: LocalTier, keeper: Keeper) -> KeeperView:
    ranks = (
        keeper.attachment.ranks if keeper.attachment is not None and tier.keepers.is_current(keeper) else ()
    )
    newest_first = sorted(keeper.holdings.values(), key=lambda one: one.attempt, reverse=True)
    return KeeperView(
        keeper.info,
        keeper.session is not None,
        tuple(sorted(ranks)),
        tier.keepers.placement.get(keeper.info.id, ()),
        keeper.disk,
        tuple(newest_first),
        keeper.transfers,
    )


def _recovery(tier: LocalTier) -> str:
    record = tier.recovery
    if record is None:
        return ""
    place = "shared storage" if record.attempt is None else "the nodes"
    return f"generation {record.generation} resumed from {place}: {record.reason}"
