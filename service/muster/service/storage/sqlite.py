"""State in one SQLite file: for one coordinator on a local or block disk (not NFS)."""

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from muster.service.storage.engine import StorageError, after

APPLICATION_ID = 0x4D535452
"""Marks a file as Muster's ("MSTR"), so that another program's database is not written to."""
SCHEMA_VERSION = 2
"""2: the file shrinks when rows are deleted (``auto_vacuum = INCREMENTAL``)."""
EPOCH_KEY = b"epoch"
SPARE_PAGES = 256
"""Free pages that the file keeps for what is written next: 1 MiB."""
PAGES_FREED = 256
"""Free pages that one commit gives back to the file system at most: 1 MiB."""
MAX_LOG_BYTES = 16 * 1024 * 1024
"""What the write-ahead log is cut back to when it has grown beyond that."""


class SqliteEngine:
    """Keeps the state in a file, committed with a full sync (WAL, ``synchronous=FULL``).

    Args:
        path: the file; it is made if its folder exists. A lock file beside it keeps a second
            coordinator out.
    """

    blocking = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db: sqlite3.Connection | None = None
        self._lock: int | None = None

    def open(self) -> int:
        """See :class:`~muster.service.storage.engine.Engine`."""
        try:
            self._take_lock()
            with self._explained("open"):
                return self._open()
        except StorageError:
            self.close()
            raise

    def _open(self) -> int:
        # isolation_level=None: transactions are begun and ended by the statements below, not by the driver.
        db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self._db = db
        db.execute("PRAGMA busy_timeout = 5000")
        application_id = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
        tables = db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if application_id != APPLICATION_ID and tables:
            raise StorageError(
                f"{self.path} is a SQLite database of another program. Give --state another path."
            )
        if version > SCHEMA_VERSION:
            raise StorageError(
                f"{self.path} was written by a newer Muster (schema {version}, this one knows "
                f"{SCHEMA_VERSION}). Run that version, or give --state another path."
            )
        problem = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(problem)
        if version < SCHEMA_VERSION:
            # Written anew, once: it takes effect no other way. Killed meanwhile, it is as it was before.
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("VACUUM")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute(f"PRAGMA journal_size_limit = {MAX_LOG_BYTES}")
        db.execute("BEGIN IMMEDIATE")
        if version == 0:
            db.execute("CREATE TABLE state (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID")
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        row = db.execute("SELECT value FROM state WHERE key = ?", (EPOCH_KEY,)).fetchone()
        epoch = _epoch(row[0]) + 1 if row else 1
        self._put(db, {EPOCH_KEY: str(epoch).encode()})
        db.execute("COMMIT")
        return epoch

    def _take_lock(self) -> None:
        path = self.path.with_name(self.path.name + ".lock")
        try:
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(
                f"{self.path} is in use by another coordinator (it holds {path}). Stop that one, or "
                "give --state another path."
            ) from None
        except OSError as error:
            raise StorageError(
                f"cannot write {path}: {error.strerror}. Give --state a path in a folder that exists "
                "and that this user may write."
            ) from error

    def scan(self) -> Iterator[tuple[bytes, bytes]]:
        """See :class:`~muster.service.storage.engine.Engine`."""
        assert self._db is not None
        with self._explained("read"):
            rows = self._db.execute("SELECT key, value FROM state WHERE key != ?", (EPOCH_KEY,))
            # All at once, so that a reader who stops halfway leaves no transaction open.
            yield from rows.fetchall()

    def commit(self, writes: Mapping[bytes, bytes | None], cleared: Sequence[bytes] = ()) -> None:
        """See :class:`~muster.service.storage.engine.Engine`."""
        db = self._db
        assert db is not None
        with self._explained("write"):
            db.execute("BEGIN IMMEDIATE")
            try:
                db.executemany(
                    "DELETE FROM state WHERE key >= ? AND key < ?",
                    ((prefix, after(prefix)) for prefix in cleared),
                )
                self._put(db, writes)
                if db.execute("PRAGMA freelist_count").fetchone()[0] > SPARE_PAGES:
                    db.execute(f"PRAGMA incremental_vacuum({PAGES_FREED})").fetchall()
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

    @contextmanager
    def _explained(self, verb: str) -> Iterator[None]:
        """Turn SQLite's errors into ours, which say what to do next."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise StorageError(
                f"cannot {verb} {self.path}: {error}. Check the disk's free space and the permissions."
            ) from error
        except sqlite3.DatabaseError as error:
            raise StorageError(
                f"cannot {verb} {self.path}: {error}. The file is damaged or not a database; restore "
                "it from a backup, or move it away to start without its history."
            ) from error


def _epoch(value: bytes) -> int:
    try:
        return int(value)
    except ValueError:
        raise sqlite3.DatabaseError(f"its epoch is {value[:40]!r}") from None
