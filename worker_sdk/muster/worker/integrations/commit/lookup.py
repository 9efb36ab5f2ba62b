"""Committed checkpoints of a folder: their markers, their order, their damage."""

import logging
import os
import time
from collections.abc import Iterable, Set
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

from muster.checkpoint.committed import MARKER, UncommittedError, committed_from, unseal
from muster.checkpoint.damage import DAMAGED, KEPT, CorruptCheckpointError, Damage, damage_in
from muster.checkpoint.manifest import MANIFEST, Manifest, ManifestError, ManifestReference
from muster.checkpoint.retry import ABSENT, ABSENT_FILE, retrying
from muster.checkpoint.source import home
from muster.checkpoint.version import LaterVersionError

logger = logging.getLogger(__name__)
REPLACED = ".replaced"
"""How the name ends of a checkpoint while another takes its place."""
RESERVED = "lost+found"
"""A folder that a file system makes, and that users may not read."""


class ReplacedError(RuntimeError):
    """Another checkpoint has the name of the one that this rank began to load.

    Args:
        path: its name.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} was replaced while it was loaded. Load it again, on all ranks.")
        self.path = path

    def __reduce__(self) -> tuple[type["ReplacedError"], tuple[Path]]:
        return type(self), (self.path,)


@dataclass(frozen=True, slots=True)
class Marker:
    """What stands in a checkpoint, or beside one that is a file, and says that it is one."""

    run_id: str
    generation: int
    world_size: int
    prefix: str
    sequence: int
    """The sequence of the decision that committed it."""
    manifest: ManifestReference | None = None
    """None if its content cannot be verified: 0.1.0 wrote no digests."""
    order: int = 0
    """Counts the commits in its folder, from 1; 0 if it is not known."""
    committed_at: float = 0.0
    """When it was committed, in seconds of Unix time by rank 0's clock, for people."""


def read(path: Path) -> tuple[Path, Marker]:
    """What a checkpoint is, and where.

    Args:
        path: its name.

    Returns:
        The same path, unless the process that replaced it ended half-way; and the marker.

    Raises:
        UncommittedError: it was not committed.
        OSError: that cannot be read. An error is never taken for absence.
    """
    try:
        return path, _marker(path)
    except (*ABSENT_FILE, ValueError, TypeError) as error:
        with suppress(*ABSENT_FILE, ValueError, TypeError):
            return replaced_name(path), _marker(replaced_name(path))
        raise UncommittedError(
            f"{path} is not a committed checkpoint: {error}. A save that was not finished, or that another "
            "program wrote, is not loaded."
        ) from error


@dataclass(frozen=True, slots=True)
class Found:
    """The checkpoint that has a name."""

    path: Path
    """Where it is: as :func:`read` returns it."""
    marker: Marker | None
    """None if it cannot be read; then it is damaged."""
    damage: Damage | None
    """Why it is not resumed from; None if nothing is known against it."""


def find(path: Path) -> Found | None:
    """Look at a checkpoint.

    Args:
        path: its name.

    Returns:
        None if it was never committed.

    Raises:
        OSError: that cannot be read.
    """
    try:
        there, marker = read(path)
    except UncommittedError as error:
        if _has_manifest(path):
            return Found(path, None, damage_of(path) or Damage(MARKER, str(error)))
        return None
    return Found(there, marker, damage_of(there))


def read_whole(path: Path) -> tuple[Path, Marker]:
    """As :func:`read`, of a checkpoint that is to be loaded.

    Raises:
        CorruptCheckpointError: it is damaged.
        UncommittedError: it was not committed.
        OSError: that cannot be read.
    """
    found = find(path)
    if found is not None and found.damage is not None:
        raise corrupt(found.path, found.damage)
    return read(path)


def latest(folder: str | Path) -> Path | None:
    """Return the checkpoint in a folder that was committed last.

    It passes over uncommitted and damaged checkpoints.

    Args:
        folder: where checkpoints have their names.

    Raises:
        CorruptCheckpointError: there are checkpoints, and all are damaged.
        OSError: they cannot be read.
    """
    return newest(Path(folder), frozenset())


def newest(folder: Path, excluded: Set[Path]) -> Path | None:
    """Return what :func:`latest` does, without checkpoints that were just found damaged.

    Args:
        folder: where checkpoints have their names.
        excluded: the paths of these.
    """
    found: dict[Path, int] = {}
    damaged: list[Found] = []
    for entry in entries(folder):
        path = given_name(entry)
        if path.name.startswith(".") or (one := find(path)) is None or one.path in excluded:
            continue
        if one.damage is not None:
            damaged.append(one)
            continue
        assert one.marker is not None
        found[path] = one.marker.order
    if damaged and not found:
        raise all_damaged(damaged)
    return max(found, key=lambda path: found[path]) if found else None


def entries(folder: Path) -> list[Path]:
    """Return the paths in a folder; none if the folder itself is certainly absent.

    Raises:
        OSError: it cannot be listed.
    """
    try:
        return sorted(
            path for path in retrying(str(folder), lambda: list(folder.iterdir())) if path.name != RESERVED
        )
    except ABSENT:
        return []


def is_kept(path: Path) -> bool:
    """Return whether somebody has marked a checkpoint as kept, so that retention must leave it.

    Args:
        path: where it is, as :func:`read` returns it.

    Raises:
        OSError: that cannot be looked at.
    """
    try:
        retrying(str(path), (home(path) / KEPT).lstat)
    except ABSENT_FILE:
        return False
    return True


# ---------------------------------------------------------------------- the order of commits


def stamped(marker: Marker, folder: Path) -> Marker:
    """Return the marker of a checkpoint that is committed now, as the last one in its folder.

    Raises:
        OSError: the markers of the others cannot be read.
    """
    return replace(marker, order=_highest(folder) + 1, committed_at=time.time())


def _highest(folder: Path) -> int:
    """Return the highest order that a checkpoint in a folder may have."""
    highest = unread = 0
    for path in entries(folder):
        if path.name.startswith(".") and not path.name.endswith(REPLACED):
            continue
        try:
            highest = max(highest, _order(path))
        except ABSENT_FILE:
            unread += _has_manifest(path)
        except PermissionError as error:
            _warn_of_unreadable(str(path), str(error))
            unread += 1
        except (ValueError, TypeError, LaterVersionError):
            unread += 1
    # Those that cannot be read now have had orders, too, and may be restored.
    return highest + unread


@lru_cache(maxsize=64)
def _warn_of_unreadable(path: str, error: str) -> None:
    """Warn once that a marker cannot be read."""
    logger.warning("%s cannot be read, so loads from its folder may fail: %s", path, error)


def _order(path: Path) -> int:
    try:
        data = (home(path) / MARKER).read_bytes()
    except (*ABSENT_FILE, PermissionError):
        raise
    except OSError:
        data = retrying(str(path), (home(path) / MARKER).read_bytes)
    return _decoded(data, path).order


# ---------------------------------------------------------------------- damage


def damage_of(path: Path) -> Damage | None:
    """Return the damage of a checkpoint, as an earlier load or a person recorded it.

    Args:
        path: where it is, as :func:`read` returns it.

    Returns:
        None if nothing is known against it.

    Raises:
        OSError: that cannot be read.
    """
    return damage_in(home(path))


def mark_damaged(path: Path, marker: Marker, damage: Damage) -> None:
    """Record durably that a checkpoint is damaged, so that nothing resumes from it.

    Args:
        path: where it is.
        marker: of what was found damaged.
        damage: the damage. If another rank has recorded some first, that stays.

    Raises:
        ReplacedError: another checkpoint has the name now. It is not marked.
    """
    logger.error("%s is damaged, and will not be resumed from: %s", path, damage)
    try:
        folder = os.open(home(path), os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ReplacedError(path) from error
    try:
        # By this descriptor: in the next moment the name may be that of another checkpoint.
        if _marker_in(folder) != marker:
            raise ReplacedError(path)
        with suppress(FileExistsError):
            mark = os.open(DAMAGED, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=folder)
            with os.fdopen(mark, "wb") as file:
                file.write(damage.encode())
                file.flush()
                os.fsync(mark)
        os.fsync(folder)
    except OSError as error:
        logger.warning("%s cannot be marked as damaged: %s", path, error)
    finally:
        os.close(folder)


def corrupt(path: Path, damage: Damage) -> CorruptCheckpointError:
    """Return the error that all ranks raise for a damaged checkpoint."""
    return CorruptCheckpointError(
        f"{path} is damaged: {damage}. What was loaded of it must not be trained on: build the state again. "
        f"Load another checkpoint, or restore its files and remove the mark, {DAMAGED}.",
        (damage,),
    )


def all_damaged(found: Iterable[Found]) -> CorruptCheckpointError:
    """Return the error for a folder in which all checkpoints are damaged."""
    damages = {one.path: one.damage for one in found if one.damage is not None}
    said = "; ".join(f"{path}: {damage}" for path, damage in damages.items())
    return CorruptCheckpointError(
        f"all committed checkpoints are damaged: {said}. Restore the files of one and remove the mark, "
        f"{DAMAGED}; or save to another place, to begin from scratch.",
        tuple(damages.values()),
    )


def _marker(path: Path) -> Marker:
    return _decoded(retrying(str(path), (home(path) / MARKER).read_bytes), path)


def _marker_in(folder: int) -> Marker | None:
    """Return the marker in an open folder; None if it has none."""
    try:
        handle = os.open(MARKER, os.O_RDONLY, dir_fd=folder)
        with os.fdopen(handle, "rb") as file:
            return _decoded(file.read(), Path(MARKER))
    except (*ABSENT_FILE, ValueError, TypeError):
        return None


def _decoded(data: bytes, path: Path) -> Marker:
    """Read a marker, of an adapter or of a ``Checkpointer``."""
    said = unseal(data)
    if "step" in said:  # A Checkpointer's.
        made = committed_from(said, path)
        place = (made.order, made.committed_at)
        return Marker(made.run_id, 0, made.world_size, made.prefix, made.sequence, made.manifest, *place)
    manifest = said.get("manifest")
    plain = {one.name for one in fields(Marker)} - {"manifest"}
    known = {name: said[name] for name in plain if name in said}
    return Marker(**known, manifest=None if manifest is None else ManifestReference(**manifest))


def _has_manifest(path: Path) -> bool:
    """Return whether a folder has a manifest of Muster's: then it was committed, even without a marker."""
    try:
        return bool(Manifest.decode(retrying(str(path), (home(path) / MANIFEST).read_bytes)))
    except LaterVersionError:
        return True
    except (*ABSENT_FILE, ManifestError):
        return False


def is_committed(path: Path) -> bool:
    """Return whether a path has the marker of a committed checkpoint.

    Raises:
        OSError: the marker cannot be read.
    """
    try:
        return bool(_marker(path))
    except (*ABSENT_FILE, ValueError, TypeError):
        return False


def given_name(path: Path) -> Path:
    """Return the name that a checkpoint was given, also while another one takes its place."""
    if not path.name.endswith(REPLACED):
        return path
    return path.with_name(path.name.removeprefix(".").removesuffix(REPLACED))


def replaced_name(path: Path) -> Path:
    """Return the name of a checkpoint while another one takes its place."""
    return path.with_name(f".{path.name}{REPLACED}")
