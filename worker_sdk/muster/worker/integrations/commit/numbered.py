"""Checkpoints whose names end with a number: their order, the newest, and what a limit removes."""

import logging
from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

from muster.checkpoint.committed import UncommittedError
from muster.checkpoint.version import LaterVersionError
from muster.worker.integrations.commit.cleanup import remove
from muster.worker.integrations.commit.lookup import Found, all_damaged, entries, find, is_kept

logger = logging.getLogger(__name__)


class NoneCommittedError(UncommittedError):
    """No checkpoint of a folder was committed, and there are others."""


class Numbered(NamedTuple):
    """A checkpoint whose name ends with a number."""

    path: Path
    """Its name."""
    number: int
    found: Found

    @property
    def whole(self) -> bool:
        """Whether it may be resumed from."""
        return self.found.damage is None


def numbered(folder: Path, named: str, excluded: Set[Path] = frozenset()) -> list[Numbered]:
    """Return the committed checkpoints, damaged ones as well, oldest commit first.

    Their numbers do not tell their order: a run may have gone back to an earlier one.

    Args:
        folder: where checkpoints have their names.
        named: how these begin; a number follows.
        excluded: checkpoints that were just found damaged.

    Raises:
        OSError: they cannot be read.
    """
    looks = [
        Numbered(path, number, found)
        for path, number in _names(folder, named).items()
        if path not in excluded and (found := find(path)) is not None
    ]

    def key(one: Numbered) -> tuple[int, int]:
        if one.found.marker is not None:
            return one.found.marker.order, one.number
        # One without a marker comes after all of lower numbers.
        lower = [other.found.marker for other in looks if other.number < one.number]
        return max((marker.order for marker in lower if marker is not None), default=0), one.number

    return sorted(looks, key=key)


def rotate(folder: Path, named: str, limit: int, kept: Set[Path]) -> None:
    """Remove stale and outdated checkpoints, as far as that can be done: the last one is no worse for it.

    Args:
        folder: where checkpoints have their names.
        named: how these begin; a number follows.
        limit: how many whole ones are to be left.
        kept: checkpoints that stay in any case.
    """
    try:
        checkpoints = numbered(folder, named)
        for old in (*stale(checkpoints, limit, kept), *outdated(checkpoints, limit)):
            remove(old)
    except (OSError, LaterVersionError) as error:  # Rank 0 alone must not stop for this.
        logger.warning("old checkpoints in %s are not removed: %s", folder, error)


def stale(checkpoints: list[Numbered], limit: int, kept: Set[Path] = frozenset()) -> list[Path]:
    """Return the names of the whole checkpoints to remove, so that ``limit`` are left.

    Args:
        checkpoints: all of them, oldest commit first.
        limit: how many whole ones are to be left. More are left if people have marked some as kept.
        kept: those that stay in any case.

    Raises:
        OSError: it cannot be seen whether one is marked.
    """
    whole = [one for one in checkpoints if one.whole]
    others = [one for one in whole if one.path not in kept]
    return [one.path for one in others[: max(0, len(whole) - limit)] if not is_kept(one.found.path)]


def outdated(checkpoints: list[Numbered], limit: int) -> list[Path]:
    """Return the damaged checkpoints after which ``limit`` whole ones were committed: nobody needs them.

    The arguments and errors are those of :func:`stale`.
    """
    newer = 0
    found = []
    for one in reversed(checkpoints):
        if one.whole:
            newer += 1
        elif newer >= limit and not is_kept(one.found.path):
            found.append(one.found.path)
    return found


def newest(folder: Path, named: str, excluded: Set[Path] = frozenset()) -> Path:
    """Return the whole checkpoint that was committed last. The arguments are those of :func:`numbered`.

    Raises:
        CorruptCheckpointError: there are checkpoints, and all are damaged.
        NoneCommittedError: no checkpoint was committed, and there are others.
        UncommittedError: there is no checkpoint.
        OSError: they cannot be read.
    """
    checkpoints = numbered(folder, named, excluded)
    if whole := [one.path for one in checkpoints if one.whole]:
        return whole[-1]
    if checkpoints:
        raise all_damaged(one.found for one in checkpoints)
    if others := ", ".join(path.name for path in _names(folder, named)):
        raise NoneCommittedError(
            f"there is no committed checkpoint in {folder}. These were saved without Muster: {others}. They "
            "are not resumed from, and later saves may replace them. Adopt one that is whole, with the "
            "adapter's adopt(…), or start from scratch in another folder."
        )
    raise UncommittedError(
        f"there is no committed checkpoint in {folder}. Start from scratch, or name one that was committed."
    )


def _names(folder: Path, named: str) -> dict[Path, int]:
    """Return the paths with such a name, and their numbers."""
    numbers = {path: path.name.removeprefix(named) for path in entries(folder) if path.name.startswith(named)}
    there = {path: int(number) for path, number in numbers.items() if number.isdecimal()}
    return dict(sorted(there.items(), key=lambda one: one[1]))
