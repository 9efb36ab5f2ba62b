"""A folder of checkpoints. Every folder in it with a checkpoint's name was committed.

A save is written under a name that begins with a dot. When every rank has written and everything is on the
disk, one rename gives it the checkpoint's name. A marker inside describes it.
"""

import errno
import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from muster.checkpoint.committed import (
    MARKER,
    WIDTH,
    Committed,
    SaveAttempt,
    UncommittedError,
    committed_from,
    run_mark,
    seal,
    step_in,
    unseal,
)
from muster.checkpoint.damage import DAMAGED, KEPT, Damage
from muster.checkpoint.manifest import MANIFEST, ManifestReference
from muster.checkpoint.retry import ABSENT, ABSENT_FILE, lexists, resolved, retrying
from muster.checkpoint.source import home

logger = logging.getLogger(__name__)

UNCOMMITTED = (".step-", ".removed-")
"""Prefixes of the names of folders that are not yet, or no longer, checkpoints."""
METADATA = ".metadata"
"""The file that torch writes last into a checkpoint."""
STEP = "step-"
"""Prefix of a checkpoint's name."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A folder with a checkpoint's name."""

    path: Path
    made: Committed | None
    """None if its marker cannot be read."""
    damage: Damage | None = None
    """Why it is not resumed from; None if nothing is known against it."""
    kept: bool = False
    """Whether it must not be removed."""

    @property
    def step(self) -> int:
        """The step in its name; :data:`NO_STEP` if the name has no step."""
        return step_in(self.path.name)

    @property
    def whole(self) -> bool:
        """Whether it may be resumed from."""
        return self.made is not None and self.damage is None

    @property
    def replaceable(self) -> bool:
        """Whether another save of its step may take its place."""
        return not self.whole and not self.kept


class CheckpointDirectory:
    """The checkpoints of one job.

    Args:
        folder: their folder; it is made if it does not exist.
        run_id: the job's run. Another run may number its attempts alike, and one of its writers may be alive.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, folder: Path, run_id: str | None = None) -> None:
        self.folder = folder
        self._run = "" if run_id is None else f"-{run_mark(run_id)}"
        self._highest: int | None = None
        """The highest order in the folder at the last sweep, for the next commit; None: it must look."""
        make_folder(folder)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(
                f"{folder} cannot be written by this user. Correct its permissions, or name another folder."
            )

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step is, or will be."""
        return self.folder / _name(step)

    def unfinished(self, step: int, attempt: SaveAttempt) -> Path:
        """Return where a step is written before it is committed.

        Args:
            step: the step.
            attempt: the same for all ranks.
        """
        return self.folder / f".step-{step:0{WIDTH}}.{attempt.generation}-{attempt.number}{self._run}"

    # ------------------------------------------------------------------ commit

    def commit(self, unfinished: Path, made: Committed) -> Committed:
        """Make a written save a checkpoint, durably. It replaces a damaged one of its step.

        Returns:
            The checkpoint, with its place in the order of commits.
        """
        highest, self._highest = self._highest, None
        made = replace(made, order=(_highest(self.entries()) if highest is None else highest) + 1)
        write_synced(unfinished / MARKER, seal(made.fields()))
        sync(unfinished)
        target = Path(made.path)
        if (entry := self.entry(target)) is not None and entry.replaceable:
            self._remove(target)
        unfinished.rename(target)
        sync(self.folder)
        return made

    def settle(self, step: int, attempt: SaveAttempt, manifest: ManifestReference) -> bool:
        """Make sure that an attempt is committed, or never will be; return whether it is.

        Its folder is renamed. So a process that is about to commit it can no longer do so.

        Args:
            step: the step.
            attempt: the attempt.
            manifest: that of the attempt.

        Raises:
            OSError: it cannot be made sure of.
        """
        unfinished = self.unfinished(step, attempt)
        doomed = self.folder / f".removed-{unfinished.name.removeprefix('.')}"
        if lexists(doomed):
            shutil.rmtree(doomed)
        try:
            unfinished.rename(doomed)
        except FileNotFoundError:
            pass
        else:
            sync(self.folder)
            shutil.rmtree(doomed, ignore_errors=True)
        entry = self.entry(self.path(step))
        return entry is not None and entry.made is not None and entry.made.manifest == manifest

    # ------------------------------------------------------------------ reading

    def read(self, path: Path) -> Committed:
        """Return what a checkpoint is.

        Raises:
            UncommittedError: it is not a committed checkpoint.
            OSError: it cannot be read.
        """
        try:
            return retrying(str(path), lambda: _read_marker(path, self._marked))
        except (*ABSENT, ValueError) as error:
            raise UncommittedError(
                f"{path} is not a committed checkpoint: {error}. A save that was not finished, or that "
                f"another program wrote, is not loaded; the last committed one here is {self._last_name()}."
            ) from error

    def all(self) -> list[Committed]:
        """Return the whole checkpoints, oldest commit first.

        Raises:
            OSError: they cannot be read.
        """
        return [entry.made for entry in self.entries() if entry.made is not None and entry.damage is None]

    def entries(self) -> list[Entry]:
        """Return all committed checkpoints, damaged ones as well, oldest commit first.

        Raises:
            OSError: they cannot be read. An error is never taken for absence.
        """
        while True:
            found, vanished = self._look()
            if not vanished:
                return found
            # Retention removes a checkpoint if there is a newer one, which this look may have missed.

    def _look(self) -> tuple[list[Entry], bool]:
        """Return the checkpoints, oldest commit first, and whether one vanished during the look."""
        found = []
        vanished = False
        for name in retrying(str(self.folder), lambda: sorted(names_in(self.folder))):
            if not name.startswith(STEP):
                continue
            path = self.folder / name
            entry = self.entry(path)
            if entry is not None:
                found.append(entry)
            else:
                vanished = vanished or not lexists(path)  # Else it is not a checkpoint of ours.
        return by_commit(found), vanished

    def entry(self, path: Path) -> Entry | None:
        """Return what is known of a folder with a checkpoint's name; None if it is not a checkpoint.

        Raises:
            OSError: it cannot be read.
        """
        return retrying(str(path), lambda: read_entry(path, self._marked))

    def _marked(self, path: Path) -> Committed:
        return committed_in(path, unseal((path / MARKER).read_bytes()))

    def latest(self) -> Committed | None:
        """Return the whole checkpoint that was committed last.

        Raises:
            OSError: the folder cannot be read.
        """
        checkpoints = self.all()
        return checkpoints[-1] if checkpoints else None

    # ------------------------------------------------------------------ marks

    def mark_damaged(self, made: Committed, damage: Damage) -> None:
        """Record durably that a checkpoint is damaged, so that no restart resumes from it."""
        logger.error("%s is damaged and will not be resumed from: %s", made.path, damage)
        mark(Path(made.path), DAMAGED, damage.encode())

    # ------------------------------------------------------------------ removal

    def sweep(
        self,
        keep_last: int | None,
        decided: SaveAttempt | None = None,
        used: Collection[Path | str] = (),
        excluded: Collection[str] = (),
    ) -> None:
        """Remove the remains of failed saves, and all but the newest checkpoints.

        Damaged checkpoints do not count. They are removed when ``keep_last`` whole ones are newer.

        Args:
            keep_last: how many checkpoints to keep; None keeps all.
            decided: the last decided save. Later ones, by their names, are still being written: other ranks
                may have started a save that this one has not heard of. None: nothing is being written.
            used: checkpoints that are being loaded, which stay.
            excluded: paths of damaged checkpoints that could not be marked. They do not count.
        """
        for name in retrying(str(self.folder), lambda: names_in(self.folder)):
            left = self.folder / name
            if name.startswith(".removed-"):
                shutil.rmtree(left, ignore_errors=True)
            elif name.startswith(".step-") and (decided is None or self._is_over(left, decided)):
                if decided is None:
                    logger.warning("%s was not committed: its save was interrupted. It is removed", left)
                self._remove(left)
        if keep_last is None:
            return
        loading = {resolved(Path(path)) for path in used}
        unmarked = {resolved(Path(path)) for path in excluded}
        newer = 0
        entries = self.entries()
        self._highest = _highest(entries)
        for entry in reversed(entries):
            if newer >= keep_last and not entry.kept and resolved(entry.path) not in loading:
                self._remove(entry.path)
            newer += entry.whole and resolved(entry.path) not in unmarked

    def _is_over(self, unfinished: Path, decided: SaveAttempt) -> bool:
        return unfinished.name.endswith(self._run) and _attempt(unfinished) <= decided

    def _remove(self, path: Path) -> None:
        # Renamed first: half of a checkpoint must not look like one, nor half of what may yet become one.
        doomed = self.folder / f".removed-{path.name.removeprefix('.')}"
        if os.path.lexists(doomed):  # An error costs nothing: the rename fails, and a later sweep removes it.
            shutil.rmtree(doomed, ignore_errors=True)
        try:
            path.rename(doomed)
        except OSError as error:
            # The checkpoint that was just made is no worse for it.
            logger.warning("%s cannot be removed: %s", path, error)
            return
        shutil.rmtree(doomed, ignore_errors=True)

    def _last_name(self) -> str:
        last = self.latest()
        return Path(last.path).name if last is not None else "none"


def _highest(entries: list[Entry]) -> int:
    """Return the highest order of a commit that one of these may have."""
    # Checkpoints that cannot be read now have orders as well, and may become readable again.
    unread = sum(entry.made is None for entry in entries)
    return max((entry.made.order for entry in entries if entry.made is not None), default=0) + unread


def names_in(folder: Path) -> list[str]:
    """Return the names of what is in a folder.

    Raises:
        OSError: it cannot be listed.
    """
    return [path.name for path in folder.iterdir()]


def _name(step: int) -> str:
    return f"{STEP}{step:0{WIDTH}}"


def _is_a_step(name: str) -> bool:
    number = name.removeprefix(STEP)
    return number.isdecimal() and name == _name(int(number))


def read_entry(path: Path, marked: Callable[[Path], Committed]) -> Entry | None:
    """Return what is known of a folder; None if it is not a checkpoint.

    Args:
        path: the folder.
        marked: reads its marker. It raises ``ValueError`` for one that is not what was written.

    Raises:
        OSError: it cannot be read.
    """
    try:
        names = names_in(path)
        damage = Damage.decode((path / DAMAGED).read_bytes()) if DAMAGED in names else None
        try:
            return Entry(path, _read_marker(path, marked), damage, KEPT in names)
        except ValueError as error:
            return Entry(path, None, damage or Damage(MARKER, str(error)), KEPT in names)
    except ABSENT_FILE:
        try:
            names = names_in(path)
        except ABSENT:
            return None  # Retention has just removed it, or it is a file of another program.
        lost = Damage(MARKER, "it is missing")
        if MANIFEST in names:
            return Entry(path, None, lost, KEPT in names)
        # Release 0.1.0 wrote no manifest. It gave this name at the commit alone, but so may another program:
        # the folder must not be taken for nothing, and must not be removed.
        return Entry(path, None, lost, kept=True) if METADATA in names and _is_a_step(path.name) else None


def _read_marker(path: Path, marked: Callable[[Path], Committed]) -> Committed:
    try:
        return marked(path)
    except ValueError:
        return marked(path)  # The first read may have been at fault.


def committed_in(path: Path, said: Mapping[str, Any]) -> Committed:
    """Return the checkpoint that is in a folder.

    Args:
        path: the folder.
        said: the fields of its marker.

    Raises:
        ValueError: the marker's fields are wrong, or it belongs to another folder.
    """
    if path.name.startswith(UNCOMMITTED):
        raise ValueError("it was not committed, or is being removed")
    made = committed_from(said, path)
    if path.name.startswith(STEP) and path.name != _name(made.step):
        raise ValueError(f"its {MARKER} says that it is step {made.step}")
    return made


def by_commit(entries: list[Entry]) -> list[Entry]:
    """Sort entries, oldest commit first. An entry without a readable marker comes after all lower steps."""
    orders = {entry.path: entry.made.order for entry in entries if entry.made is not None}

    def key(entry: Entry) -> tuple[int, int]:
        if entry.made is not None:
            return entry.made.age_order
        return max(
            (orders[one.path] for one in entries if one.made and one.step < entry.step), default=0
        ), entry.step

    return sorted(entries, key=key)


def _attempt(unfinished: Path) -> SaveAttempt:
    """Return the attempt in a name. An unknown name sorts before every attempt."""
    try:
        generation, number, *_ = unfinished.name.rpartition(".")[2].split("-")
        return SaveAttempt(int(generation), int(number))
    except ValueError:
        return SaveAttempt(-1, -1)


# ---------------------------------------------------------------------- files


def write_marker(folder: Path, marker: dict[str, Any]) -> None:
    """Write a folder's marker, on the disk with the folder's entries."""
    write_synced(folder / MARKER, seal(marker))
    sync(folder)


def mark(path: Path, name: str, data: bytes = b"") -> None:
    """Put a mark into a checkpoint, a folder or a file, on the disk."""
    write_synced(home(path) / name, data)
    sync(home(path))


def unmark(path: Path, name: str) -> None:
    """Take a mark out of a checkpoint, a folder or a file, on the disk."""
    (home(path) / name).unlink(missing_ok=True)
    sync(home(path))


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and sync it to the disk. The caller must sync the folder."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Put a file's content on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Put a folder's entries on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, and sync their entries, also if another process has just made them."""
    folder.mkdir(parents=True, exist_ok=True)
    device = folder.stat().st_dev
    for parent in folder.resolve().parents:
        if parent.stat().st_dev != device:
            break  # This is another file system.
        try:
            sync(parent)
        except OSError as error:
            # A user may make folders in a parent that it may not read. Then the parent's owner must sync it.
            if error.errno not in (errno.EACCES, errno.EINVAL):
                raise
