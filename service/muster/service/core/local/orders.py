"""What each keeper is to hold, fetch and persist: pure functions of the keepers and the copies."""

from collections.abc import Mapping, Sequence

from muster.service.core.local.copies import Copies
from muster.service.core.local.keepers import Keeper, Keepers
from muster.service.core.vocabulary.local import Attempt, Level, Location, Order, Orders, Peers

ANY_PART = -1
"""Means the manifest, in a set of ranks whose parts a keeper has not."""


def peers_of(keepers: Keepers, token: str) -> Peers:
    """Return the keepers of the current generation, as each of them is told."""
    return Peers(
        keepers.generation,
        token,
        tuple(
            Location(keeper.info.url, tuple(sorted(keeper.attachment.ranks)))
            for keeper in keepers.current()
            if keeper.attachment is not None and keeper.session is not None
        ),
    )


def orders_for(
    keeper: Keeper,
    keepers: Keepers,
    copies: Sequence[Copies],
    resumed: Attempt | None,
    everywhere: Mapping[str, Location],
    forget_before: Attempt,
    persisting: Copies | None,
) -> Orders:
    """Return all that a keeper is to hold.

    Every checkpoint that is kept is named, so that a keeper deletes nothing of it: it may have parts that it
    has not verified and reported yet.

    Args:
        keeper: the keeper.
        keepers: all of the run.
        copies: the checkpoints that are kept, from the oldest to the newest.
        resumed: the checkpoint that the current generation resumes from; None: none.
        everywhere: where all parts of that one are, by the ids of the keepers.
        forget_before: the oldest attempt that may still be committed.
        persisting: the checkpoint that keepers are to persist; None: none.
    """
    orders = []
    for one in copies:
        if one.is_in_shared_storage_alone:
            if one.level is Level.PERSISTED:  # For people.
                orders.append(Order(one.checkpoint, one.level, (), ()))
            continue
        wanted = _wanted(keeper, keepers, one, resumed)
        held = one.counts(keeper.holdings.get(one.attempt))
        # Ranks have loaded it when they have made another one. Until then each may need parts of all.
        is_loading = one.attempt == resumed and one is copies[-1]
        persist: tuple[int, ...] = ()
        commit = False
        if one is persisting:
            persist = tuple(rank for rank in sorted(held) if _persists(keeper, keepers, one, rank))
            commit = one.is_all_persisted and committer(one) == keeper.info.id
        # Before a commit, the keeper may have to replace files that were removed from shared storage.
        needed = set(range(one.checkpoint.world_size)) if commit else wanted
        orders.append(
            Order(
                one.checkpoint,
                one.level,
                tuple(sorted(wanted | held)),
                _elsewhere(keeper, everywhere)
                if is_loading
                else _sources(keeper, keepers, one, sorted(needed - held), holds_part=bool(held)),
                persist,
                commit,
            )
        )
    return Orders(tuple(orders), forget_before)


def _wanted(keeper: Keeper, keepers: Keepers, one: Copies, resumed: Attempt | None) -> set[int]:
    """Return the ranks of the current generation whose parts a keeper is to hold: its own, and the copies."""
    checkpoint = one.checkpoint
    if checkpoint.attempt.generation != keepers.generation and one.attempt != resumed:
        return set()  # Its ranks were on other nodes, and the next checkpoint replaces it.
    wanted: set[int] = set()
    for origin in [keeper, *keepers.origins(keeper)]:
        attachment = origin.attachment
        if attachment is None or not keepers.is_current(origin):
            continue
        if attachment.world_size == checkpoint.world_size:
            wanted |= attachment.ranks
    return wanted


def locations_of(one: Copies, keepers: Keepers) -> dict[str, Location]:
    """Return where all parts of a checkpoint are, and its manifest, by the ids of the keepers."""
    ranks: dict[str, list[int]] = {}
    for rank, holders in enumerate(one.holders):
        for holder in holders:
            ranks.setdefault(holder, []).append(rank)
    ranks.setdefault(one.record.keeper_id, [])
    found = ((keepers.find(keeper_id), ranks[keeper_id]) for keeper_id in sorted(ranks))
    return {
        keeper.info.id: Location(keeper.info.url, tuple(held))
        for keeper, held in found
        if keeper is not None and keeper.session is not None
    }


def parts_without_source(
    orders: Orders, copies: Mapping[Attempt, Copies], resumed: Attempt | None
) -> set[tuple[Attempt, int]]:
    """Return the parts that a keeper with these orders may need, and that no connected keeper has.

    ``ANY_PART`` means the manifest: each keeper with a part has it.
    """
    found: set[tuple[Attempt, int]] = set()
    for order in orders.checkpoints:
        attempt = order.checkpoint.attempt
        one = copies[attempt]
        if not one.is_fresh and not one.some_holders():
            found.add((attempt, ANY_PART))
        missing = one.missing() if attempt == resumed else order.ranks
        found.update((attempt, rank) for rank in missing if not one.holders[rank])
    return found


def _elsewhere(keeper: Keeper, everywhere: Mapping[str, Location]) -> tuple[Location, ...]:
    return tuple(location for keeper_id, location in everywhere.items() if keeper_id != keeper.info.id)


def _sources(
    keeper: Keeper, keepers: Keepers, one: Copies, needed: Sequence[int], *, holds_part: bool
) -> tuple[Location, ...]:
    """Return where a keeper gets the parts that it needs, and the manifest.

    A keeper that has reported no part may have one that it cannot verify without the manifest.
    """
    by_keeper: dict[str, list[int]] = {}
    for rank in needed:
        for holder in sorted(one.holders[rank]):
            if holder != keeper.info.id:
                by_keeper.setdefault(holder, []).append(rank)
    if needed or not holds_part:
        others = () if holds_part or one.is_fresh else one.some_holders()
        for keeper_id in (one.record.keeper_id, *others):
            if keeper_id != keeper.info.id:
                by_keeper.setdefault(keeper_id, [])
    found = []
    for keeper_id, ranks in by_keeper.items():
        source = keepers.find(keeper_id)
        if source is not None and source.session is not None:
            found.append(Location(source.info.url, tuple(ranks)))
    return tuple(found)


def _persists(keeper: Keeper, keepers: Keepers, one: Copies, rank: int) -> bool:
    """Whether a keeper, of those that have a part, is the one that copies it to shared storage."""
    if rank in one.persisted:
        return False
    holders = sorted(one.holders[rank])
    own = [holder for holder in holders if _writes(keepers.find(holder), rank)]
    return (own or holders)[0] == keeper.info.id


def _writes(keeper: Keeper | None, rank: int) -> bool:
    return keeper is not None and keeper.attachment is not None and rank in keeper.attachment.ranks


def committer(one: Copies) -> str:
    """Return the id of the keeper that commits in shared storage: the first with a part of it; or ""."""
    return min({holder for of_rank in one.holders for holder in of_rank}, default="")
