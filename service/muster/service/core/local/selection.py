"""Which local checkpoints count: the newest ones, the next to persist, and those that need not be kept."""

from collections.abc import Iterable, Sequence

from muster.service.core.local.copies import Copies
from muster.service.core.vocabulary.local import Attempt, Level, LocalCheckpoint

KEPT = 2
"""Checkpoints that are kept once they are as safe as asked for."""
MAX_KEPT = 6
"""Checkpoints that are kept at most beside the newest whole one, however far behind their copies are."""


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
        if safe < KEPT and number < MAX_KEPT:
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
