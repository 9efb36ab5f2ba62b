"""Copies of a SQLite state: made while a coordinator writes it, and put back while none does."""

import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from muster.service.storage.engine import StorageError, after
from muster.service.storage.sqlite import EPOCH_KEY, SqliteEngine, check_owner, epoch_of, explained, take_lock

EPOCH_LEAP = 1_000
"""A restored state's epoch goes up by so many, beyond any that a coordinator may have had since the backup.
So none is used twice, even if the state that was lost cannot be read. It is also no less than the seconds
since 1970, so that a backup that is put back again does not give again what it gave the first time."""
RUN_ROWS = b"run\0"
"""The keys of runs begin so."""


@dataclass(frozen=True, slots=True)
class Copy:
    """What was copied."""

    runs: int
    bytes: int
    epoch: int


def backup(state: Path, file: Path, *, force: bool) -> Copy:
    """Copy a state as it is at one moment. A coordinator may go on writing meanwhile.

    Args:
        state: the state's file.
        file: the backup; it is there whole, or not at all.
        force: whether it may take the place of another.

    Raises:
        StorageError: it cannot be made.
    """
    if not state.exists():
        raise StorageError(f"there is no state at {state}. Give --state the one that muster serve has.")
    if file.exists() and state.samefile(file):
        raise StorageError(f"{file} is the state itself. Name another file for the backup.")
    _check_free(file, force)
    with _beside(file) as copy:
        with explained("read", state):
            _copy(state, copy)
        done = _finish(copy, state)
        copy.replace(file)
    _sync_folder(file)
    return done


def restore(file: Path, state: Path, *, force: bool) -> Copy:
    """Put a backup in the place of a state that no coordinator has open.

    Its epoch becomes higher than that of either, so that no process takes what comes next for the past.

    Args:
        file: the backup.
        state: the state's file.
        force: whether it may take the place of a state that is there.

    Raises:
        StorageError: the backup is not one, or the state is in use, or there already.
    """
    if not file.exists():
        raise StorageError(f"there is no backup at {file}.")
    if state.exists() and state.samefile(file):
        raise StorageError(f"{file} is the state itself. Name the backup.")
    lock = take_lock(state)
    try:
        _check_free(state, force)
        with _beside(state) as copy:
            with explained("read", file):
                _copy(file, copy)
                _raise_epoch(copy, _epoch_there(state))
            done = _finish(copy, file)
            # A log that is left would be taken for the restored file's own.
            for ending in ("-wal", "-shm"):
                state.with_name(state.name + ending).unlink(missing_ok=True)
            copy.replace(state)
        _sync_folder(state)
    finally:
        os.close(lock)
    return done


def write(rows: Mapping[bytes, bytes], epoch: int, file: Path, *, force: bool) -> Copy:
    """Write a backup of rows that come from elsewhere.

    Args:
        rows: the whole state, without its epoch.
        epoch: how often it was opened.
        file: the backup; it is there whole, or not at all.
        force: whether it may take the place of another.

    Raises:
        StorageError: it cannot be written.
    """
    _check_free(file, force)
    with _beside(file) as copy:
        engine = SqliteEngine(copy)
        engine.open()
        engine.commit(rows)
        engine.close()
        copy.with_name(copy.name + ".lock").unlink()
        with explained("write", copy), closing(sqlite3.connect(copy)) as db:
            _set_epoch(db, epoch)
            db.execute("PRAGMA journal_mode = DELETE").fetchone()
        done = _finish(copy, copy)
        copy.replace(file)
    _sync_folder(file)
    return done


def read(file: Path) -> tuple[dict[bytes, bytes], int]:
    """The rows of a backup, and its epoch.

    Raises:
        StorageError: it is not one.
    """
    if not file.exists():
        raise StorageError(f"there is no backup at {file}.")
    with tempfile.TemporaryDirectory(prefix="muster-restore-") as folder:
        copy = Path(folder) / "copy"
        with explained("read", file):
            _copy(file, copy)
            with closing(sqlite3.connect(copy)) as db:
                found = db.execute("SELECT key, value FROM state WHERE key != ?", (EPOCH_KEY,))
                return dict(found.fetchall()), epoch_of(db)


def _check_free(file: Path, force: bool) -> None:
    if file.exists() and not force:
        raise StorageError(f"{file} exists. Give --force to replace it, or name another file.")


@contextmanager
def _beside(file: Path) -> Iterator[Path]:
    """A file of another name in the same folder, which is gone in the end."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{file.name}.", suffix=".partial", dir=file.parent)
    except OSError as error:
        raise StorageError(
            f"cannot write in {file.parent}: {error.strerror}. Name a file in a folder that exists and that "
            "this user may write."
        ) from error
    os.close(handle)
    try:
        yield Path(name)
    finally:
        for ending in ("", "-journal", "-wal", "-shm"):
            Path(name + ending).unlink(missing_ok=True)


def _copy(source: Path, target: Path) -> None:
    """By SQLite's own means, which see one state of the source, its log included."""
    uri = f"file:{quote(str(source.absolute()))}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as there, closing(sqlite3.connect(target)) as here:
        if not check_owner(there, source):
            raise StorageError(f"{source} is empty: no coordinator has ever written there.")
        there.backup(here)
        # One file, without a log beside it.
        here.execute("PRAGMA journal_mode = DELETE").fetchone()
    shutil.copymode(source, target)


def _finish(copy: Path, source: Path) -> Copy:
    """Check a copy from its first page to its last, and see to it that it is on the disk."""
    with explained("copy", source), closing(sqlite3.connect(copy)) as db:
        problem = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(problem)
        rows = "SELECT count(*) FROM state WHERE key >= ? AND key < ?"
        (runs,) = db.execute(rows, (RUN_ROWS, after(RUN_ROWS))).fetchone()
        done = Copy(runs=runs, bytes=copy.stat().st_size, epoch=epoch_of(db))
    with copy.open("rb") as written:
        os.fsync(written.fileno())
    return done


def _epoch_there(state: Path) -> int:
    """The epoch of the state that is replaced; 0 if there is none that could be read."""
    if state.exists():
        with suppress(sqlite3.Error), closing(sqlite3.connect(state)) as db:
            return epoch_of(db)
    return 0


def _raise_epoch(copy: Path, other: int) -> None:
    with closing(sqlite3.connect(copy)) as db:
        _set_epoch(db, raised_epoch(epoch_of(db), other))


def raised_epoch(backup: int, there: int) -> int:
    """The epoch of a state that was put back: above that of the backup and of the state that it replaces."""
    return max(max(backup, there) + EPOCH_LEAP, int(time.time()))


def _set_epoch(db: sqlite3.Connection, epoch: int) -> None:
    with db:
        db.execute(
            "INSERT INTO state VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (EPOCH_KEY, str(epoch).encode()),
        )


def _sync_folder(file: Path) -> None:
    """The new name is on the disk, too."""
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
