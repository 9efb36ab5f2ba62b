"""Backups of a SQLite state. A coordinator may run during a backup, but not during a restore."""

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
"""Increase of a restored state's epoch, beyond any epoch since the backup. So no epoch is used twice, even if
the lost state cannot be read. The epoch is also at least the seconds since 1970, so that a second restore of
the same backup gets a new epoch."""
RUN_ROWS = b"run\0"
"""The keys of run records begin so."""


@dataclass(frozen=True, slots=True)
class Copy:
    """What a backup or restore copied."""

    runs: int
    bytes: int
    epoch: int


def backup(state: Path, file: Path, *, force: bool) -> Copy:
    """Copy a state as of one moment. A coordinator may write meanwhile.

    Args:
        state: the state's file.
        file: the backup; it appears complete or not at all.
        force: whether it may replace another file.

    Raises:
        StorageError: the backup cannot be made.
    """
    if not state.exists():
        raise StorageError(f"there is no state at {state}. Give --state the one that muster serve has.")
    if file.exists() and state.samefile(file):
        raise StorageError(f"{file} is the state itself. Name another file for the backup.")
    _check_free(file, force)
    with _temporary(file) as copy:
        with explained("read", state):
            _copy(state, copy)
        done = _finish(copy, state)
        copy.replace(file)
    _sync_folder(file)
    return done


def restore(file: Path, state: Path, *, force: bool) -> Copy:
    """Replace a state that no coordinator has open with a backup.

    The epoch becomes higher than that of both, so that no process takes later events for earlier ones.

    Args:
        file: the backup.
        state: the state's file.
        force: whether it may replace an existing state.

    Raises:
        StorageError: the file is not a backup, or the state is in use or exists already.
    """
    if not file.exists():
        raise StorageError(f"there is no backup at {file}.")
    if state.exists() and state.samefile(file):
        raise StorageError(f"{file} is the state itself. Name the backup.")
    lock = take_lock(state)
    try:
        _check_free(state, force)
        with _temporary(state) as copy:
            with explained("read", file):
                _copy(file, copy)
                _raise_epoch(copy, _epoch_of_replaced(state))
            done = _finish(copy, file)
            # SQLite would take a leftover log for the restored file's own.
            for ending in ("-wal", "-shm"):
                state.with_name(state.name + ending).unlink(missing_ok=True)
            copy.replace(state)
        _sync_folder(state)
    finally:
        os.close(lock)
    return done


def write(rows: Mapping[bytes, bytes], epoch: int, file: Path, *, force: bool) -> Copy:
    """Write a backup of rows from another storage.

    Args:
        rows: the complete state, without its epoch.
        epoch: the epoch of the state.
        file: the backup; it appears complete or not at all.
        force: whether it may replace another file.

    Raises:
        StorageError: the backup cannot be written.
    """
    _check_free(file, force)
    with _temporary(file) as copy:
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
    """Read the rows of a backup, and its epoch.

    Raises:
        StorageError: the file is not a backup.
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
def _temporary(file: Path) -> Iterator[Path]:
    """Make a temporary file in the same folder, and remove it afterwards."""
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
    """Copy by SQLite's backup API, which reads one consistent state, its log included."""
    uri = f"file:{quote(str(source.absolute()))}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as there, closing(sqlite3.connect(target)) as here:
        if not check_owner(there, source):
            raise StorageError(f"{source} is empty: no coordinator has ever written there.")
        there.backup(here)
        # A single file without a separate log.
        here.execute("PRAGMA journal_mode = DELETE").fetchone()
    shutil.copymode(source, target)


def _finish(copy: Path, source: Path) -> Copy:
    """Check all pages of a copy, and sync it to disk."""
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


def _epoch_of_replaced(state: Path) -> int:
    """Return the epoch of the replaced state; 0: it cannot be read."""
    if state.exists():
        with suppress(sqlite3.Error), closing(sqlite3.connect(state)) as db:
            return epoch_of(db)
    return 0


def _raise_epoch(copy: Path, other: int) -> None:
    with closing(sqlite3.connect(copy)) as db:
        _set_epoch(db, raised_epoch(epoch_of(db), other))


def raised_epoch(backup: int, there: int) -> int:
    """Return the epoch of a restored state: above those of the backup and of the replaced state."""
    return max(max(backup, there) + EPOCH_LEAP, int(time.time()))


def _set_epoch(db: sqlite3.Connection, epoch: int) -> None:
    with db:
        db.execute(
            "INSERT INTO state VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (EPOCH_KEY, str(epoch).encode()),
        )


def _sync_folder(file: Path) -> None:
    """Sync a folder, so that a file's new name is durable as well."""
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
