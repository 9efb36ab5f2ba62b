"""A checkpoint of any name: written beside it, and renamed once when all ranks have written."""

import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from muster.checkpoint.committed import MARKER, UncommittedError, committed_from, run_mark, unseal
from muster.checkpoint.damage import DAMAGED, KEPT, CorruptCheckpointError, Damage
from muster.checkpoint.directory import make_folder, sync, sync_file, write_marker, write_synced
from muster.checkpoint.manifest import MANIFEST, Manifest, ManifestError, ManifestReference
from muster.checkpoint.retry import retrying
from muster.checkpoint.source import beside, home
from muster.checkpoint.version import LaterVersionError

logger = logging.getLogger(__name__)

REPLACED = ".replaced"
"""How the name ends of a checkpoint while another takes its place."""
REMOVED = ".removed-"
"""How the name begins of what is being removed."""
ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors that prove that a marker is absent. No other error does."""
_UNFINISHED = re.compile(r"\..+\.\d+-\d+-[0-9a-f]{8}")
"""The name of what is not committed."""
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
    """Of the decision that committed it."""
    manifest: ManifestReference | None = None
    """None if its content cannot be verified: 0.1.0 wrote no digests."""
    order: int = 0
    """Counts the commits in its folder, from 1; 0 if it is not known."""
    committed_at: float = 0.0
    """When it was committed, in seconds of Unix time by rank 0's clock, for people."""


class Aside:
    """One save of a checkpoint, on the rank that commits it.

    Args:
        path: the checkpoint's name.
        generation: the job's life between restarts.
        number: of the save in it.
        run_id: of the job: others may write beside it, or have done so.
        alias: what stands for the name while it is written, where a framework takes whatever has the name in
            its own for a checkpoint; default: the name.
        within: write it into a folder that stands there, under this name; default: there itself.
    """

    def __init__(
        self,
        path: Path,
        generation: int,
        number: int,
        run_id: str,
        alias: str = "",
        within: str = "",
    ) -> None:
        self.path = path
        self._alias = alias or path.name
        self._place = path.with_name(f".{self._alias}.{generation}-{number}-{run_mark(run_id)}")
        self.unfinished = self._place / within
        """Where it is written."""

    def begin(self) -> None:
        """Make the folder that is written to, and remove what saves of this name have left."""
        self.prepare()
        self.unfinished.mkdir()

    def prepare(self) -> None:
        """As :meth:`begin`, where the framework makes the folder, or writes a file."""
        make_folder(self.path.parent)
        _restore(self.path)
        finish(self.path)
        sweep(self.path.parent, self._alias)

    def give_up(self) -> None:
        """Remove what was written, unless it was committed."""
        remove(self._place)

    def commit(self, marker: Marker, manifest: Manifest | None = None) -> None:
        """When all have written: make it the checkpoint, on the disk and for good.

        One of the same name is replaced. At each moment there is the old one or the new one, and
        :func:`read` finds it. A checkpoint that is a file gets its marker and manifest beside it in the next
        moment. If this process dies before, :func:`finish` does so.

        Args:
            marker: describes it, without its place in the order of commits.
            manifest: its files and digests. A file must have been written ``within`` a folder.

        Raises:
            OSError: it could not be done, or another life of the job has removed what was written.
        """
        folder = self.unfinished.is_dir()
        described = self.unfinished if folder else self._place
        marker = stamped(marker, self.path.parent)
        if manifest is not None:
            data = manifest.encode()
            write_synced(described / MANIFEST, data)
            marker = replace(marker, manifest=ManifestReference.of(data))
        if not folder:
            sync_file(self.unfinished)
        write_marker(described, asdict(marker))
        self._take_away_beside()
        foreign = None
        if _is_folder(self.path) and _is_committed(self.path):
            remove(_replaced(self.path))
            self.path.rename(_replaced(self.path))
        elif (folder or _is_folder(self.path)) and os.path.lexists(self.path):  # Else one rename replaces it.
            foreign = _doomed(self.path)
            self.path.rename(foreign)
        try:
            self.unfinished.rename(self.path)
        except OSError:
            if foreign is not None:
                foreign.rename(self.path)
            finish(self.path)
            _restore(self.path)
            raise
        if foreign is not None:
            _destroy(foreign)
        try:
            sync(self.path.parent)
            if not folder:
                self._place.rename(beside(self.path))
                sync(self.path.parent)
        except OSError as error:
            # It has its name, so that nobody may say that it was not committed.
            logger.warning("%s has its name, and may lose it if this machine fails now: %s", self.path, error)
            return
        for left in (_replaced(self.path), _replaced(beside(self.path)), self._place):
            with suppress(OSError):
                remove(left)

    def _take_away_beside(self) -> None:
        """Before another file has the name: what describes the one that has it must not describe that."""
        old = beside(self.path)
        if os.path.lexists(old):
            remove(_replaced(old))
            old.rename(_replaced(old))
            sync(self.path.parent)


def check_name(path: Path, content: str = "") -> None:
    """See that what a save would replace is a checkpoint, torn or not, or nothing.

    Args:
        path: the checkpoint's name.
        content: the name of a file that is in a framework's own checkpoints, beside torch's.

    Raises:
        IsADirectoryError: it is a folder of something else.
    """
    if path.is_dir() and not path.is_symlink():
        names = {entry.name for entry in path.iterdir()}
        known = names & {MARKER, content} or any(name.endswith(".distcp") for name in names)
        if names and not known:
            raise IsADirectoryError(
                f"{path} is a folder, and no checkpoint: it is not replaced. Name another."
            )


def read(path: Path) -> tuple[Path, Marker]:
    """What a checkpoint is, and where.

    Args:
        path: its name.

    Returns:
        The same path, unless the process that replaced it ended half-way; and the marker.

    Raises:
        UncommittedError: it is none.
        OSError: that cannot be read. An error is never taken for absence.
    """
    try:
        return path, _marker(path)
    except (*ABSENT, ValueError, TypeError) as error:
        with suppress(*ABSENT, ValueError, TypeError):
            return _replaced(path), _marker(_replaced(path))
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
        UncommittedError: it is none.
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
        path = entry
        if path.name.endswith(REPLACED):
            path = path.with_name(path.name.removeprefix(".").removesuffix(REPLACED))
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
    except ABSENT:
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
        except PermissionError:
            continue  # It is another user's.
        except ABSENT:
            unread += _has_manifest(path)
        except (ValueError, TypeError, LaterVersionError):
            unread += 1
    # Those that cannot be read now have had orders, too, and may be restored.
    return highest + unread


def _order(path: Path) -> int:
    try:
        data = (home(path) / MARKER).read_bytes()
    except (*ABSENT, PermissionError):
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
    try:
        return Damage.decode(retrying(str(path), (home(path) / DAMAGED).read_bytes))
    except ABSENT:
        return None


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


# ---------------------------------------------------------------------- names


def restore(folder: Path) -> list[Path]:
    """Give checkpoints their names back, of which the processes have died that replaced them.

    Args:
        folder: where checkpoints have their names.

    Returns:
        Those that have them back.
    """
    names = [
        left.with_name(left.name.removeprefix(".").removesuffix(REPLACED))
        for left in entries(folder)
        if left.name.startswith(".") and not left.name.startswith("..") and left.name.endswith(REPLACED)
    ]
    without = [path for path in names if not os.path.lexists(path)]
    for path in without:
        _restore(path)
    return [path for path in without if os.path.lexists(path)]


def sweep(folder: Path, alias: str | None = None, but: Path | None = None) -> None:
    """Remove what saves have left, and those whom nobody needs any more.

    Args:
        folder: where checkpoints have their names.
        alias: of the saves, as in :class:`Aside`; default: any.
        but: what is being written now.
    """
    unfinished = re.compile(rf"\.{'.+' if alias is None else re.escape(alias)}\.\d+-\d+(-[0-9a-f]{{8}})?")
    for left in entries(folder):
        if left.name.startswith(REMOVED):
            _destroy(left)
        elif not unfinished.fullmatch(left.name) or (but is not None and left in (but, *but.parents)):
            continue
        elif not _finish(left):
            remove(left)


def finish(path: Path) -> None:
    """Put beside a file what describes it, if the process that committed or replaced it died before it could.

    Args:
        path: the checkpoint.

    Raises:
        OSError: that cannot be done.
    """
    if not path.is_file() or os.path.lexists(beside(path)):
        return
    for left in entries(path.parent):
        if _UNFINISHED.fullmatch(left.name):
            _finish(left)
    if not os.path.lexists(beside(path)) and os.path.lexists(_replaced(beside(path))):
        # The file has not been replaced.
        _replaced(beside(path)).rename(beside(path))


def remove(path: Path) -> None:
    """Remove a checkpoint, or what may have become one.

    Args:
        path: of a folder, a file or a link; it need not be there.
    """
    if path.is_file() and os.path.lexists(beside(path)):
        _destroy(retire(beside(path)))
    if os.path.lexists(path):
        _destroy(retire(path))


def retire(path: Path) -> Path:
    """Take a checkpoint's name away, before it is removed.

    Half of a checkpoint must not look like one, and who still writes it must not commit it.

    Returns:
        Where it is to be removed; whoever sweeps the folder does so, too.
    """
    doomed = _doomed(path)
    path.rename(doomed)
    return doomed


def _marker(path: Path) -> Marker:
    return _decoded(retrying(str(path), (home(path) / MARKER).read_bytes), path)


def _marker_in(folder: int) -> Marker | None:
    """Return the marker in an open folder; None if it has none."""
    try:
        handle = os.open(MARKER, os.O_RDONLY, dir_fd=folder)
        with os.fdopen(handle, "rb") as file:
            return _decoded(file.read(), Path(MARKER))
    except (*ABSENT, ValueError, TypeError):
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
    except (*ABSENT, ManifestError):
        return False


def _is_committed(path: Path) -> bool:
    try:
        return bool(_marker(path))
    except (*ABSENT, ValueError, TypeError):
        return False


def _doomed(path: Path) -> Path:
    return path.with_name(f"{REMOVED}{uuid.uuid4().hex}")


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}{REPLACED}")


def _finish(left: Path) -> bool:
    """Put beside a file what describes it, if its commit was left after the rename that gave it its name.

    Args:
        left: the folder in which it was written.

    Returns:
        Whether it was so.
    """
    try:
        _marker(left)
        files = list(Manifest.decode((left / MANIFEST).read_bytes()).files)
    except (OSError, ValueError, TypeError, LaterVersionError):
        return False
    path = left.with_name(files[0]) if len(files) == 1 and "/" not in files[0] else left
    if not path.is_file() or os.path.lexists(left / path.name) or os.path.lexists(beside(path)):
        return False
    left.rename(beside(path))
    return True


def _restore(path: Path) -> None:
    """End a replacement that was left half-way."""
    if _is_committed(path):
        remove(_replaced(path))
    elif _is_committed(_replaced(path)) and not os.path.lexists(path):
        _replaced(path).rename(path)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _destroy(path: Path) -> None:
    """Remove what is no checkpoint any more, as far as that can be done."""
    if _is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
