"""The keeper's folder on a node, as far as ranks use it."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.local_folder import ADDRESS, LOCK, REQUEST, attempt_name, parse_attempt, run_folder

LOG_TAIL = 2_000
"""Largest number of bytes of the keeper's log that an error quotes."""


@dataclass(frozen=True, slots=True)
class RunningKeeper:
    """A keeper as it describes itself when it is ready."""

    pid: int
    url: str
    """Where ranks of this node reach it."""
    token: str
    """The bearer token that these ranks show it."""
    id: str
    """The same after a restart."""


class LocalFolder:
    """The folder in which one run's keeper and ranks of one node keep parts of checkpoints.

    Args:
        parent: the user's local folder.
        run_id: the training job.
    """

    def __init__(self, parent: Path, run_id: str) -> None:
        self.parent = parent
        self.run_id = run_id
        self.path = run_folder(parent, run_id)

    def make(self) -> None:
        """Make it, and ask the keepers of this node for one, if there are any.

        Raises:
            OSError: it cannot be made, or not be written.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise PermissionError(
                f"{self.path} cannot be written by this user. Correct its permissions, or give another "
                "folder: local=…"
            )
        with suppress(FileNotFoundError):
            os.utime(self.path / REQUEST)  # This works also on a full disk, which must not end the job.
            return
        draft = self.path / f".{REQUEST}-{os.getpid()}"
        draft.write_text(self.run_id)
        draft.rename(self.path / REQUEST)

    def is_requested(self) -> bool:
        """Return whether the keepers of this node are asked for one."""
        return (self.path / REQUEST).exists()

    def attempt(self, attempt: SaveAttempt) -> Path:
        """Return where the files of an attempt are."""
        return self.path / attempt_name(attempt)

    @staticmethod
    def attempt_in(path: Path | str) -> SaveAttempt:
        """Return the attempt whose folder this is."""
        return parse_attempt(Path(path).name)

    @property
    def log(self) -> Path:
        """The keeper's log file."""
        return self.path / "keeper.log"

    def keeper(self) -> RunningKeeper | None:
        """Return the last keeper that was ready; None if there was none. It may have ended."""
        try:
            said = json.loads((self.path / ADDRESS).read_bytes())
            return RunningKeeper(int(said["pid"]), str(said["url"]), str(said["token"]), str(said["id"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def is_kept(self) -> bool:
        """Return whether a keeper runs: it holds its lock.

        For a moment this takes the lock. So only the rank that holds :meth:`starting` may ask: a keeper that
        starts in this moment would end.
        """
        handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            return not _lock(handle)
        finally:
            os.close(handle)

    @contextmanager
    def starting(self) -> Iterator[bool]:
        """Be the only rank of this node that starts a keeper.

        Yields:
            Whether this rank is the one.
        """
        handle = os.open(self.path / "keeper.start", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _lock(handle):
                yield False
                return
            try:
                yield True
            finally:
                # A child that is forked meanwhile holds the same lock, and must not keep it.
                fcntl.flock(handle, fcntl.LOCK_UN)
        finally:
            os.close(handle)

    def log_tail(self) -> str:
        """Return the end of the keeper's log, for an error."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL))
                return file.read().decode("utf-8", "replace").strip()
        except OSError as error:
            return f"(the log cannot be read: {error})"


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
