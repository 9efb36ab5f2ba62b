"""State in one SQLite file, for one coordinator on a local or block disk (not NFS)."""

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from muster.service.storage.engine import StorageError, after

APPLICATION_ID = 0x4D535452
"""Marks a file as Muster's ("MSTR"), so that it never writes to another program's database."""
SCHEMA_VERSION = 3
"""2: the file shrinks when rows are deleted (``auto_vacuum = INCREMENTAL``). 3: the rows are no longer in the
index of the keys (``WITHOUT ROWID``), where SQLite reads a whole row, of up to 4 MiB, to compare its key."""
TABLE = "CREATE TABLE state (key BLOB PRIMARY KEY NOT NULL, value BLOB NOT NULL)"
EPOCH_KEY = b"epoch"
OWN = 0o600
"""The permissions of new files, which have all values of the runs' stores."""
SPARE_PAGES = 256
"""Free pages that the file keeps for the next writes: 1 MiB."""
PAGES_FREED = 256
"""Free pages that one commit returns to the file system at most: 1 MiB."""
MAX_LOG_BYTES = 16 * 1024 * 1024
"""The size to which SQLite truncates a larger write-ahead log."""


class SqliteEngine:
    """Stores the state in a file, and syncs each commit.

    If the file system can map shared memory, the file has a write-ahead log (WAL), and otherwise a rollback
    journal. ``synchronous=EXTRA`` makes a commit durable with both: with a rollback journal, FULL could lose
    the last commit at a power loss. With a log the two are the same.

    Args:
        path: the file; it is created if its folder exists. A lock file in the same folder keeps a second
            coordinator out.
    """

    blocking = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opening_seconds = 0.0
        self._db: sqlite3.Connection | None = None
        self._lock: int | None = None

    def open(self) -> int:
        """See :class:`~muster.service.storage.engine.Engine`."""
        try:
            self._lock = take_lock(self.path)
            # SQLite would create it by the umask. Its log gets the permissions of the file.
            with suppress(OSError):  # SQLite then reports the error.
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWN))
            with explained("open", self.path):
                return self._open()
        except StorageError:
            self.close()
            raise

    def _open(self) -> int:
        # isolation_level=None: the statements below begin and end transactions, not the sqlite3 module.
        db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self._db = db
        db.execute("PRAGMA busy_timeout = 5000")
        version = check_owner(db, self.path)
        problem = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(problem)
        if version < SCHEMA_VERSION:
            # If the process is killed meanwhile, the next one does it again.
            if version:
                self._convert(db)
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("VACUUM")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = EXTRA")
        db.execute(f"PRAGMA journal_size_limit = {MAX_LOG_BYTES}")
        db.execute("BEGIN IMMEDIATE")
        if version == 0:
            db.execute(TABLE)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        epoch = epoch_of(db) + 1
        self._put(db, {EPOCH_KEY: str(epoch).encode()})
        began = time.monotonic()
        db.execute("COMMIT")
        self.opening_seconds = time.monotonic() - began
        return epoch

    @staticmethod
    def _convert(db: sqlite3.Connection) -> None:
        """Put the rows of an older schema into a table of this one."""
        db.execute("BEGIN IMMEDIATE")
        db.execute("ALTER TABLE state RENAME TO old")
        db.execute(TABLE)
        db.execute("INSERT INTO state SELECT key, value FROM old ORDER BY key")
        db.execute("DROP TABLE old")
        db.execute("COMMIT")

    def scan(self) -> Iterator[tuple[bytes, bytes]]:
        """See :class:`~muster.service.storage.engine.Engine`."""
        assert self._db is not None
        with explained("read", self.path):
            rows = self._db.execute("SELECT key, value FROM state WHERE key != ?", (EPOCH_KEY,))
            # All at once, so that a caller that stops halfway leaves no transaction open.
            yield from rows.fetchall()

    def check_lead(self) -> None:
        """See :class:`~muster.service.storage.engine.Engine`."""

    def commit(self, writes: Mapping[bytes, bytes | None], cleared: Sequence[bytes] = ()) -> None:
        """See :class:`~muster.service.storage.engine.Engine`."""
        db = self._db
        assert db is not None
        with explained("write", self.path):
            if db.execute("PRAGMA freelist_count").fetchone()[0] > SPARE_PAGES:
                # A script, because a single statement would free one page only.
                db.executescript(f"PRAGMA incremental_vacuum({PAGES_FREED})")
            db.execute("BEGIN IMMEDIATE")
            try:
                db.executemany(
                    "DELETE FROM state WHERE key >= ? AND key < ?",
                    ((prefix, after(prefix)) for prefix in cleared),
                )
                self._put(db, writes)
                db.execute("COMMIT")
            except sqlite3.Error:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    @staticmethod
    def _put(db: sqlite3.Connection, writes: Mapping[bytes, bytes | None]) -> None:
        db.executemany(
            "INSERT INTO state VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            ((key, value) for key, value in writes.items() if value is not None),
        )
        db.executemany(
            "DELETE FROM state WHERE key = ?",
            ((key,) for key, value in writes.items() if value is None),
        )

    def close(self) -> None:
        """See :class:`~muster.service.storage.engine.Engine`."""
        if self._db is not None:
            self._db.close()
            self._db = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def take_lock(path: Path) -> int:
    """Lock a state until the returned descriptor is closed.

    Raises:
        StorageError: another process has the lock, or the lock file cannot be made.
    """
    file = path.with_name(path.name + ".lock")
    try:
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWN)
    except OSError as error:
        raise _no_lock(file, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise StorageError(
                f"{path} is in use by another coordinator (it holds {file}). Stop that one, or "
                "give --state another path."
            ) from None
        raise _no_lock(file, error) from error
    return lock


def _no_lock(file: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write {file}: {error.strerror}. Give --state a path in a folder that exists "
        "and that this user may write."
    )


def check_owner(db: sqlite3.Connection, path: Path) -> int:
    """Check that a database is Muster's or empty.

    Returns:
        The version of its schema; 0: it is empty.

    Raises:
        StorageError: it belongs to another program or to a newer Muster.
    """
    application_id = db.execute("PRAGMA application_id").fetchone()[0]
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    tables = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if application_id != APPLICATION_ID and tables:
        raise StorageError(f"{path} is a SQLite database of another program. Give --state another path.")
    if version > SCHEMA_VERSION:
        raise StorageError(
            f"{path} was written by a newer Muster (schema {version}, this one knows "
            f"{SCHEMA_VERSION}). Run that version, or give --state another path."
        )
    return version


def epoch_of(db: sqlite3.Connection) -> int:
    """Return how often the state has been opened."""
    row = db.execute("SELECT value FROM state WHERE key = ?", (EPOCH_KEY,)).fetchone()
    try:
        return int(row[0]) if row else 0
    except ValueError:
        raise sqlite3.DatabaseError(f"its epoch is {row[0][:40]!r}") from None


@contextmanager
def explained(verb: str, path: Path) -> Iterator[None]:
    """Raise SQLite's errors as storage errors that say what to do next."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise StorageError(
            f"cannot {verb} {path}: {error}. Check the disk's free space and the permissions."
        ) from error
    except sqlite3.DatabaseError as error:
        raise StorageError(
            f"cannot {verb} {path}: {error}. The file is damaged or not a database; restore "
            "it from a backup, or move it away to start without its history."
        ) from error
