"""Which tag is loaded: the same committed checkpoint on all ranks."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from muster.checkpoint.committed import UncommittedError
from muster.checkpoint.damage import Damage
from muster.checkpoint.retry import ABSENT, retrying
from muster.worker.integrations.commit.lookup import Marker, corrupt, find, newest, read
from muster.worker.integrations.deepspeed.ranks import of_all
from muster.worker.saves.failure import failure_text

logger = logging.getLogger(__name__)

LATEST = "latest"
"""The file in which DeepSpeed names the tag that it resumes from."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What rank 0 says of a load."""

    tag: str | None
    """None: there is nothing to load."""
    error: Exception | None = None
    """Why all fail."""


def choose(folder: Path, tag: object, damaged: Mapping[Path, Damage]) -> Choice:
    """Choose on rank 0 which tag is loaded.

    Args:
        folder: the folder of the checkpoints.
        tag: the tag that the script names; None: the one that ``latest`` names, or that was committed last.
        damaged: the checkpoints that were just found damaged.
    """
    try:
        if tag is not None:
            found = find(folder / str(tag))
            if found is not None and (damage := found.damage or damaged.get(found.path)) is not None:
                return Choice(None, corrupt(found.path, damage))
            return Choice(str(tag))
        found = None
        if (named := _named(folder)) is not None:
            found = find(folder / named)
            if found is not None and found.damage is None and found.path not in damaged:
                return Choice(named)
        last = newest(folder, damaged.keys())
    except Exception as error:  # The others wait for this rank, whatever happens to it.
        return Choice(None, error)
    if last is not None:
        why = "is not there" if named is None else "is passed over, since it is damaged or not committed"
        logger.warning("%s %s; %s is loaded, which was committed last", named or LATEST, why, last)
        return Choice(last.name)
    if damaged:
        return Choice(None, corrupt(*list(damaged.items())[-1]))
    if named is None:
        return Choice(None)
    if found is not None and found.damage is not None:  # A tag in a folder of its own, which has no other.
        return Choice(None, corrupt(found.path, found.damage))
    _, now = find_tag(folder / named)
    return Choice(named) if isinstance(now, Marker) else Choice(None, now)


def _named(folder: Path) -> str | None:
    """Return the tag that ``latest`` names; None if that file is certainly absent."""
    try:
        return retrying(str(folder / LATEST), (folder / LATEST).read_text).strip()
    except ABSENT:
        return None


def check_none(folder: Path, rank: int) -> None:
    """Confirm on all ranks that there is no checkpoint, where rank 0 has found none.

    Args:
        folder: the folder of the checkpoints.
        rank: this rank.

    Raises:
        RuntimeError: a rank finds one, or cannot look.
    """
    said: str | None = None
    try:
        if rank != 0 and (last := newest(folder, frozenset())) is not None:
            said = f"finds {last}: the ranks do not see the same folder. Mount it on rank 0's host"
    except Exception as error:  # The others wait for this rank, whatever happens to it.
        said = f"cannot tell: {error}. See that {folder} can be read on all hosts"
    for other, what in enumerate(of_all(said)):
        if what is not None:
            raise RuntimeError(
                f"rank 0 finds no checkpoint, and rank {other} {what}, and start the job again."
            )


def _refusal(path: Path, why: object) -> UncommittedError:
    return UncommittedError(
        f"{why} If it was saved before this job committed its checkpoints, and is known to be whole, say "
        f'so once: muster.worker.integrations.deepspeed.adopt("{path}").'
    )


def find_tag(path: Path) -> tuple[Path, Marker | Exception]:
    """Where a checkpoint is, and what it is, or why it is not loaded."""
    try:
        return read(path)
    except UncommittedError as error:
        return path, _refusal(path, error)
    except Exception as error:  # The others wait for this rank, whatever happens to it.
        return path, error


def check_same(path: Path, *found: Marker | Exception) -> None:
    """All ranks go on, or none.

    Raises:
        UncommittedError: what is there is not committed.
        RuntimeError: a rank cannot read it, or the ranks have found different saves, or one after the other.
    """
    by_rank = of_all(found)
    for rank, ones in enumerate(by_rank):
        for one in ones:
            if isinstance(one, UncommittedError):
                raise one
            if isinstance(one, Exception):
                raise RuntimeError(f"{path} cannot be loaded: rank {rank} failed: {failure_text(one)}")
    if len({one for ones in by_rank for one in ones}) > 1:
        raise RuntimeError(f"{path} was replaced while it was loaded. Load it again, on all ranks.")
