"""A keeper's folder on the node: its lock, its id, its address for the node's ranks, and the attempts in it.

The folder is all of the keeper's state. A file that is being fetched has the name ``.NAME.fetch``, so that a
file with its own name is complete, if not verified.
"""

import fcntl
import json
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.containment import path_in
from muster.checkpoint.directory import sync
from muster.checkpoint.local_folder import ADDRESS, LOCK, NOTES, attempt_name, find_attempt, run_folder
from muster.checkpoint.retry import ABSENT, lexists
from muster.keeper.vocabulary import HEAD

logger = logging.getLogger(__name__)

ID = "keeper.id"
REMOVED = ".removed-"
"""The prefix of an attempt that is being deleted."""
FREE_SHARE = 0.9
"""The share of the free space that a keeper may use if no quota is given."""
MAX_ID = 64
"""Longest id of a keeper that is read, in characters. An id that is made here has 32."""


class FolderInUseError(RuntimeError):
    """Another keeper runs in the folder."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Identifies a file's content: it changes if the file is replaced or written to."""

    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> "Signature | None":
        """Return the signature of a regular file; None if there is no such file."""
        try:
            found = path.lstat()
        except ABSENT:
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


class KeeperFolder:
    """The folder of one run's keeper on this node.

    Args:
        local: the user's local folder.
        run_id: the run.
    """

    def __init__(self, local: Path, run_id: str) -> None:
        self.path = run_folder(local, run_id)
        self._lock = -1

    # ------------------------------------------------------------------ the keeper

    def lock(self) -> None:
        """Make the folder, and take it for this process until it ends.

        Raises:
            FolderInUseError: another keeper has it.
            OSError: it cannot be written.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise FolderInUseError(
                f"another keeper runs in {self.path}. One keeper serves all ranks of a run on its node."
            ) from None
        self._lock = lock
        for name in self._names():
            if name.startswith(REMOVED):
                shutil.rmtree(self.path / name, ignore_errors=True)

    def retract(self) -> None:
        """Remove the keeper's address. The lock stays until the process ends: threads may still write."""
        (self.path / ADDRESS).unlink(missing_ok=True)

    def id(self) -> str:
        """Return the id of this folder's keepers; it is made once."""
        try:
            known = (self.path / ID).read_text("utf-8").strip()
        except (FileNotFoundError, UnicodeDecodeError):
            known = ""
        if known.isascii() and known.isalnum() and len(known) <= MAX_ID:
            return known
        made = uuid4().hex
        self._write_private(ID, made.encode())
        return made

    def announce(self, url: str, token: str, keeper_id: str) -> None:
        """Tell the node's ranks where the keeper is."""
        said = {"pid": os.getpid(), "url": url, "token": token, "id": keeper_id}
        self._write_private(ADDRESS, json.dumps(said).encode())

    def _write_private(self, name: str, data: bytes) -> None:
        """Write a file that only this user may read, by rename."""
        draft = self.path / f".{name}.draft"
        draft.unlink(missing_ok=True)
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(self.path / name)
        sync(self.path)

    # ------------------------------------------------------------------ attempts

    def attempts(self) -> set[SaveAttempt]:
        """Return the attempts that have a folder."""
        return {attempt for attempt in map(find_attempt, self._names()) if attempt is not None}

    def attempt(self, attempt: SaveAttempt) -> Path:
        """Return the folder of an attempt, whether it is there or not."""
        return self.path / attempt_name(attempt)

    def file(self, attempt: SaveAttempt, name: str) -> Path:
        """Return the path of an attempt's file, whether it is there or not.

        Raises:
            ValueError: the name leads out of the attempt's folder.
        """
        return path_in(self.attempt(attempt), name)

    def note(self, attempt: SaveAttempt, name: str) -> Path:
        """Return the path of a note.

        Raises:
            ValueError: the name leads out of the folder of the attempt's notes.
        """
        return path_in(self.attempt(attempt) / NOTES, name)

    def files(self, attempt: SaveAttempt) -> frozenset[str]:
        """Return the names of an attempt's regular files, without what is being fetched."""
        try:
            with os.scandir(self.attempt(attempt)) as entries:
                return frozenset(
                    entry.name
                    for entry in entries
                    if entry.is_file(follow_symlinks=False)
                    and (entry.name in HEAD or not entry.name.startswith("."))
                )
        except ABSENT:
            return frozenset()

    def begin(self, attempt: SaveAttempt) -> Path:
        """Make the folder of an attempt."""
        path = self.attempt(attempt)
        if not path.is_dir():
            path.mkdir(mode=0o700, exist_ok=True)
            sync(self.path)
        return path

    def delete(self, attempt: SaveAttempt) -> None:
        """Delete what is here of an attempt."""
        doomed = self.path / f"{REMOVED}{attempt_name(attempt)}"
        shutil.rmtree(doomed, ignore_errors=True)
        with suppress(FileNotFoundError):
            # Renamed first: half of an attempt must not be taken for an attempt.
            self.attempt(attempt).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
        if lexists(doomed):
            raise OSError(f"{doomed} cannot be removed. Correct the permissions of the files in it.")

    def _names(self) -> list[str]:
        return os.listdir(self.path)  # noqa: PTH208 – names are what is asked for

    # ------------------------------------------------------------------ space

    def used(self) -> int:
        """Return the bytes that the folder takes on its disk."""
        return sum(_allocated(self.path))

    def free(self) -> int:
        """Return the free bytes of the folder's file system."""
        return shutil.disk_usage(self.path).free

    def default_quota(self) -> int:
        """Return the bytes that the folder may take if no quota is given."""
        return self.used() + int(FREE_SHARE * self.free())


def partial_path(path: Path) -> Path:
    """Return the name that a file has while it is fetched."""
    return path.with_name(f".{path.name}.fetch")


def _allocated(folder: Path) -> Iterator[int]:
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # It was just removed.
                yield os.lstat(os.path.join(path, name)).st_blocks * 512  # noqa: PTH118 – ten times faster
