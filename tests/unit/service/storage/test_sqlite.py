"""What only the SQLite engine does: its file, its lock, and a disk that fails."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.patience import PATIENCE
from muster.service.storage.engine import StorageError
from muster.service.storage.sqlite import (
    APPLICATION_ID,
    PAGES_FREED,
    SCHEMA_VERSION,
    SPARE_PAGES,
    SqliteEngine,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "muster.db"


@pytest.fixture
def engine(path: Path) -> Iterator[SqliteEngine]:
    """Opened for the first time, with one row."""
    engine = SqliteEngine(path)
    assert engine.open() == 1
    engine.commit({b"a": b"1"})
    yield engine
    engine.close()


def refused(path: Path) -> str:
    """Return why the file cannot be opened. A refused engine holds no lock."""
    engine = SqliteEngine(path)
    with pytest.raises(StorageError) as caught:
        engine.open()
    assert (engine._db, engine._lock) == (None, None)
    assert str(path) in str(caught.value)
    return str(caught.value)


def stored(path: Path) -> tuple[int, dict[bytes, bytes]]:
    """What a coordinator that starts now would find: its epoch, and the data."""
    engine = SqliteEngine(path)
    try:
        return engine.open(), dict(engine.scan())
    finally:
        engine.close()


def settle(path: Path) -> bytes:
    """The file's bytes, once no write-ahead log is left beside it."""
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    return path.read_bytes()


# ---------------------------------------------------------------------- whose file it is


def test_file_says_that_it_is_musters(engine: SqliteEngine, path: Path):
    with sqlite3.connect(path) as other:
        assert other.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert other.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    other.close()


def test_commit_is_synced_before_it_returns(engine: SqliteEngine):
    assert engine._db is not None
    assert engine._db.execute("PRAGMA synchronous").fetchone() == (3,), "EXTRA"


class WithoutLog(sqlite3.Connection):
    """On a file system that maps no shared memory: SQLite keeps the journal that it has, and says so."""

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        return super().execute(sql.replace("journal_mode = WAL", "journal_mode"), *parameters)


def test_commit_is_synced_with_its_folder_without_a_write_ahead_log(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    connect = sqlite3.connect

    def connect_without_log(path: Path, **options: Any) -> sqlite3.Connection:
        return connect(path, factory=WithoutLog, **options)

    monkeypatch.setattr(sqlite3, "connect", connect_without_log)
    engine = SqliteEngine(path)
    engine.open()
    assert engine._db is not None
    engine.commit({b"a": b"1"})
    assert engine._db.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert engine._db.execute("PRAGMA synchronous").fetchone() == (3,), "EXTRA"
    assert dict(engine.scan()) == {b"a": b"1"}
    engine.close()


def test_second_coordinator_is_kept_out_until_the_first_lets_go(engine: SqliteEngine, path: Path):
    assert "in use by another coordinator" in refused(path)
    engine.commit({b"b": b"2"})
    engine.close()
    assert stored(path) == (2, {b"a": b"1", b"b": b"2"})


def test_empty_file_is_taken(path: Path):
    path.touch()
    assert stored(path) == (1, {})


def test_newer_schema_is_refused_and_left_alone(engine: SqliteEngine, path: Path):
    engine.close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()
    before = settle(path)
    message = refused(path)
    assert f"newer Muster (schema {SCHEMA_VERSION + 1}, this one knows {SCHEMA_VERSION})" in message
    assert path.read_bytes() == before


@pytest.mark.parametrize("table", ["state (key BLOB PRIMARY KEY, value BLOB)", "users (name TEXT)"])
def test_another_programs_database_is_refused_and_left_alone(path: Path, table: str):
    with sqlite3.connect(path) as db:
        db.execute(f"CREATE TABLE {table}")
    db.close()
    before = path.read_bytes()
    assert "database of another program. Give --state another path." in refused(path)
    assert path.read_bytes() == before


# ---------------------------------------------------------------------- damage


def test_file_that_is_no_database_is_explained_and_left_alone(path: Path):
    path.write_bytes(b"loss=0.25\n" * 1000)
    message = refused(path)
    assert "file is not a database" in message
    assert "restore it from a backup, or move it away" in message
    assert path.read_bytes() == b"loss=0.25\n" * 1000


@pytest.mark.parametrize("damage", ["overwritten", "cut off"])
def test_damaged_database_is_explained_and_left_alone(engine: SqliteEngine, path: Path, damage: str):
    engine.commit({b"%d" % number: os.urandom(3000) for number in range(100)})
    engine.close()
    whole = settle(path)
    half = len(whole) // 2
    damaged = (
        whole[:half] + b"\xa5" * 20_000 + whole[half + 20_000 :] if damage == "overwritten" else whole[:half]
    )
    path.write_bytes(damaged)
    assert "The file is damaged or not a database" in refused(path)
    assert path.read_bytes() == damaged
    path.write_bytes(whole)
    assert len(stored(path)[1]) == 101


# ---------------------------------------------------------------------- places that cannot be written


def test_folder_that_does_not_exist_is_named(tmp_path: Path):
    message = refused(tmp_path / "nowhere" / "muster.db")
    assert f"cannot write {tmp_path}/nowhere/muster.db.lock: No such file or directory" in message
    assert "a folder that exists" in message


def test_folder_in_place_of_the_file_is_explained(path: Path):
    path.mkdir()
    assert "unable to open database file" in refused(path)


def test_file_in_place_of_the_folder_is_explained(tmp_path: Path):
    (tmp_path / "file").touch()
    assert "Not a directory" in refused(tmp_path / "file" / "muster.db")


def run_child(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


OPEN_UNPRIVILEGED = """
import os, sys
from pathlib import Path
from muster.service.storage.engine import StorageError
from muster.service.storage.sqlite import SqliteEngine
os.chdir(sys.argv[1])
if os.geteuid() == 0:
    os.setuid(65534)  # root may write anywhere
try:
    SqliteEngine(Path("muster.db")).open()
except StorageError as error:
    print(error)
"""


@pytest.mark.parametrize("known", [False, True])
def test_folder_that_may_not_be_written_is_named(tmp_path: Path, known: bool):
    if known:
        stored(tmp_path / "muster.db")
    tmp_path.chmod(0o555)
    with run_child(OPEN_UNPRIVILEGED, tmp_path) as child:
        said, _ = child.communicate(timeout=PATIENCE)
    tmp_path.chmod(0o755)
    assert "cannot write muster.db.lock: Permission denied" in said
    assert "that this user may write" in said


# ---------------------------------------------------------------------- a full disk


def test_commit_that_does_not_fit_is_not_done_at_all(engine: SqliteEngine, path: Path):
    assert engine._db is not None
    (pages,) = engine._db.execute("PRAGMA page_count").fetchone()
    engine._db.execute(f"PRAGMA max_page_count = {pages + 10}")
    with pytest.raises(StorageError) as caught:
        engine.commit({b"a": None, b"b": b"2", **{b"%d" % n: b"x" * 1000 for n in range(1000)}})
    assert f"cannot write {path}: database or disk is full" in str(caught.value)
    assert "free space" in str(caught.value)
    assert dict(engine.scan()) == {b"a": b"1"}
    engine.commit({b"b": b"2"})
    engine.close()
    assert stored(path) == (2, {b"a": b"1", b"b": b"2"})


def test_commit_that_fails_halfway_is_rolled_back_and_the_next_succeeds(engine: SqliteEngine):
    with pytest.raises(StorageError):
        engine.commit({b"b": b"2", b"c": object()})  # type: ignore[dict-item]
    assert dict(engine.scan()) == {b"a": b"1"}
    engine.commit({b"d": b"4"})
    assert dict(engine.scan()) == {b"a": b"1", b"d": b"4"}


FILL = """
import resource, sys
from pathlib import Path
from muster.service.storage.engine import StorageError
from muster.service.storage.sqlite import SqliteEngine
engine = SqliteEngine(Path(sys.argv[1]))
engine.open()
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
number = 0
try:
    while True:
        engine.commit({b"a%d" % number: b"x" * 1000, b"b%d" % number: b"x" * 1000})
        number += 1
except StorageError as error:
    print(number, error, flush=True)
"""


def test_disk_that_takes_no_more_loses_nothing_that_was_acknowledged(path: Path):
    with run_child(FILL, path) as child:
        number, _, why = child.communicate(timeout=PATIENCE)[0].partition(" ")
    assert why.startswith(f"cannot write {path}: ")
    assert "Check the disk's free space" in why
    assert int(number) > 0
    assert_pairs(stored(path)[1], at_least=int(number))


# ---------------------------------------------------------------------- kill -9

COMMIT_FOR_EVER = """
import sys
from pathlib import Path
from muster.service.storage.sqlite import SqliteEngine
engine = SqliteEngine(Path(sys.argv[1]))
print(engine.open(), flush=True)
number = len(dict(engine.scan())) // 2
while True:
    engine.commit({b"a%d" % number: b"x" * 1000, b"b%d" % number: b"x" * 1000})
    print(number, flush=True)
    number += 1
"""


def test_kill_9_amid_commits_loses_nothing_that_was_acknowledged(path: Path):
    """Processes commit to one file for different times. Each is killed while it commits."""
    for start, commits in enumerate((1, 40, 7), start=1):
        with run_child(COMMIT_FOR_EVER, path) as child:
            assert child.stdout is not None
            assert int(child.stdout.readline()) == 2 * start - 1
            acknowledged = [int(child.stdout.readline()) for _ in range(commits)]
            child.kill()
            acknowledged += [int(line) for line in child.stdout]
        epoch, found = stored(path)
        assert epoch == 2 * start
        assert_pairs(found, at_least=acknowledged[-1] + 1)


def assert_pairs(found: dict[bytes, bytes], *, at_least: int) -> None:
    """Commits are there from the first on without a gap, and each is there as a whole."""
    commits = len(found) // 2
    assert set(found) == {b"%b%d" % (letter, n) for letter in (b"a", b"b") for n in range(commits)}
    assert set(found.values()) <= {b"x" * 1000}
    assert commits >= at_least


def test_epoch_that_is_no_number_is_damage(engine: SqliteEngine, path: Path):
    engine.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE state SET value = 'x' WHERE key = ?", (b"epoch",))
    db.close()
    assert "its epoch is" in refused(path)


# ---------------------------------------------------------------------- its size


def pages(path: Path) -> int:
    with sqlite3.connect(path) as db:
        (count,) = db.execute("PRAGMA page_count").fetchone()
    db.close()
    return int(count)


def fill(engine: SqliteEngine, run: bytes, rows: int = 2_000) -> None:
    engine.commit({b"storekey\0%s\0%d" % (run, number): bytes(2_000) for number in range(rows)})


def test_cleared_space_is_returned_in_pieces(engine: SqliteEngine, path: Path):
    fill(engine, b"job1")
    full = pages(path)
    engine.commit({}, [b"storekey\0job1\0"])
    sizes = [full]
    for _ in range(full // PAGES_FREED + 1):
        engine.commit({b"a": b"2"})
        sizes.append(pages(path))
        assert sizes[-2] - sizes[-1] <= PAGES_FREED + 2, "they and the map of pages"
    assert sizes[-1] <= SPARE_PAGES + 10
    assert full > 3 * PAGES_FREED


def test_file_that_is_filled_and_cleared_again_and_again_does_not_grow(engine: SqliteEngine, path: Path):
    sizes = []
    for number in range(6):
        fill(engine, b"job%d" % number)
        engine.commit({}, [b"storekey\0job%d\0" % number])
        sizes.append(pages(path))
    assert max(sizes[1:]) <= sizes[0] + PAGES_FREED
    engine.close()
    assert path.stat().st_size <= sizes[0] * 4096 + PAGES_FREED * 4096


@pytest.mark.parametrize("version", [1, 2])
def test_file_of_an_older_schema_is_converted_and_keeps_its_rows(path: Path, version: int):
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("CREATE TABLE state (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID")
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {version}")
    db.execute("INSERT INTO state VALUES (?, ?)", (b"epoch", b"7"))
    db.execute("INSERT INTO state VALUES (?, ?)", (b"a", b"1"))
    db.close()
    assert stored(path) == (8, {b"a": b"1"})
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA auto_vacuum").fetchone() == (2,), "incremental"
        assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert db.execute("SELECT count(rowid) FROM state").fetchone() == (2,), "rows outside of the index"
        # As a process leaves it that is killed after the conversion.
        db.execute(f"PRAGMA user_version = {version}")
    db.close()
    assert stored(path) == (9, {b"a": b"1"})


def test_new_database_and_its_log_are_for_their_user_alone(tmp_path: Path):
    before = os.umask(0o022)
    try:
        engine = SqliteEngine(tmp_path / "muster.db")
        engine.open()
        engine.commit({b"key": b"value"})
        modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
        engine.close()
    finally:
        os.umask(before)
    assert modes == {f"muster.db{ending}": 0o600 for ending in ("", "-wal", "-shm", ".lock")}
