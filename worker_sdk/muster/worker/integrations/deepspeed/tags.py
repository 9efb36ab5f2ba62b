"""Which tag is loaded: the same committed checkpoint on all ranks."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from muster.checkpoint.committed import UncommittedError
from muster.checkpoint.damage import CorruptCheckpointError, Damage
from muster.worker.integrations.commit.lookup import Marker, corrupt, find, newest, read
from muster.worker.integrations.deepspeed.ranks import of_all

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
        try:
            named = (folder / LATEST).read_text().strip()
        except FileNotFoundError:
            return Choice(None)
        found = find(folder / named)
        if found is not None and found.damage is None and found.path not in damaged:
            return Choice(named)
        last = newest(folder, damaged.keys())
    except (OSError, ValueError, CorruptCheckpointError) as error:
        return Choice(None, error)
    if last is not None:
        logger.warning("%s is passed over, since it is damaged or not committed; %s is loaded", named, last)
        return Choice(last.name)
    if damaged:
        return Choice(None, corrupt(*list(damaged.items())[-1]))
    _, why = find_tag(folder / named)
    return Choice(None, UncommittedError(str(why)))


def _refusal(path: Path, error: Exception) -> str:
    return (
        f"{error} If it was saved before this job committed its checkpoints, and is known to be whole, say "
        f'so once: muster.worker.integrations.deepspeed.adopt("{path}").'
    )


def find_tag(path: Path) -> tuple[Path, Marker | str]:
    """Where a checkpoint is, and what it is, or why it was not committed."""
    try:
        return read(path)
    except (UncommittedError, OSError) as error:
        return path, _refusal(path, error)


def check_same(path: Path, *found: Marker | str) -> None:
    """All ranks go on, or none.

    Raises:
        UncommittedError: what is there is not committed.
        RuntimeError: the ranks have found different saves, or one after the other.
    """
    by_rank = of_all(found)
    every = [one for rank in by_rank for one in rank]
    for one in every:
        if isinstance(one, str):
            raise UncommittedError(one)
    if len(set(every)) > 1:
        raise RuntimeError(f"{path} was replaced while it was loaded. Load it again, on all ranks.")
