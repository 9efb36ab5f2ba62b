"""Backups are made while the state is written, and are whole; they are restored where nobody is."""

import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from muster.service.storage.backup import EPOCH_LEAP, backup, restore
from muster.service.storage.engine import StorageError
from muster.service.storage.sqlite import SqliteEngine
from tests.unit.service.storage.test_sqlite import stored

ROWS = {b"run\0job%d" % number: bytes(500) for number in range(300)}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "muster.db"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "backup.db"


@pytest.fixture
def engine(state: Path) -> Iterator[SqliteEngine]:
    """A coordinator's, with some rows."""
    engine = SqliteEngine(state)
    engine.open()
    engine.commit(ROWS)
    yield engine
    engine.close()


def rows(path: Path) -> dict[bytes, bytes]:
    return stored(path)[1]


def epoch(path: Path) -> int:
    """That of a coordinator that is started now."""
    return stored(path)[0]


# ---------------------------------------------------------------------- backup


def test_backup_of_a_state_in_use_includes_its_log(engine: SqliteEngine, state: Path, file: Path):
    engine.commit({b"late": b"1"})
    done = backup(state, file, force=False)
    assert (done.runs, done.epoch, done.bytes) == (len(ROWS), 1, file.stat().st_size)
    assert rows(file) == ROWS | {b"late": b"1"}
    engine.commit({b"later": b"2"})


def test_copy_is_one_moment_while_rows_are_written_in_pairs(engine: SqliteEngine, state: Path, file: Path):
    stop = threading.Event()

    def write() -> None:
        for number in iter(int, 1):
            if stop.is_set():
                return
            engine.commit({b"one": b"%d" % number, b"two%d" % (number % 50): bytes(4_000)})
            engine.commit({b"a": os.urandom(8)})
            both = os.urandom(8)
            engine.commit({b"left": both, b"right": both})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(10):
            backup(state, file, force=True)
            found = rows(file)
            assert found.get(b"left") == found.get(b"right")
    finally:
        stop.set()
        writer.join()


def test_nothing_but_the_backup_is_left(engine: SqliteEngine, state: Path, file: Path):
    before = set(state.parent.iterdir())
    backup(state, file, force=False)
    assert set(state.parent.iterdir()) - before == {file}
    assert file.stat().st_mode == state.stat().st_mode


def test_another_file_is_replaced_only_if_asked(engine: SqliteEngine, state: Path, file: Path):
    file.write_text("precious")
    with pytest.raises(StorageError, match=r"exists\. Give --force to replace it"):
        backup(state, file, force=False)
    assert file.read_text() == "precious"
    backup(state, file, force=True)
    assert rows(file) == ROWS


def test_state_is_not_its_own_backup(engine: SqliteEngine, state: Path):
    with pytest.raises(StorageError, match="is the state itself"):
        backup(state, state, force=True)


def test_other_databases_are_not_copied(tmp_path: Path, state: Path, file: Path):
    with pytest.raises(StorageError, match="there is no state at"):
        backup(state, file, force=False)
    with closing(sqlite3.connect(state)) as db:
        db.execute("CREATE TABLE users (name TEXT)")
    with pytest.raises(StorageError, match="database of another program"):
        backup(state, file, force=False)
    state.write_bytes(b"loss=0.25\n" * 1_000)
    with pytest.raises(StorageError, match="not a database"):
        backup(state, file, force=False)
    state.write_bytes(b"")
    with pytest.raises(StorageError, match="is empty"):
        backup(state, file, force=False)
    assert set(tmp_path.iterdir()) == {state}


def test_damaged_state_makes_no_backup(engine: SqliteEngine, state: Path, file: Path):
    engine.close()
    with state.open("r+b") as damaged:
        damaged.seek(8192 + 100)
        damaged.write(os.urandom(4096 * 3))
    file.write_text("the last good one")
    with pytest.raises(StorageError, match=f"{state}: "):
        backup(state, file, force=True)
    assert file.read_text() == "the last good one"


def test_folder_that_is_not_there_is_named(engine: SqliteEngine, state: Path, tmp_path: Path):
    with pytest.raises(StorageError, match=r"cannot write in .*nowhere: No such file"):
        backup(state, tmp_path / "nowhere" / "backup.db", force=False)


# ---------------------------------------------------------------------- restore


def test_backup_comes_back_where_nothing_is(engine: SqliteEngine, state: Path, file: Path, tmp_path: Path):
    backup(state, file, force=False)
    elsewhere = tmp_path / "elsewhere.db"
    assert restore(file, elsewhere, force=False).runs == len(ROWS)
    assert rows(elsewhere) == ROWS
    assert rows(file) == ROWS


def test_state_that_a_coordinator_has_open_is_left_alone(engine: SqliteEngine, state: Path, file: Path):
    backup(state, file, force=False)
    engine.commit({b"late": b"1"})
    with pytest.raises(StorageError, match="in use by another coordinator"):
        restore(file, state, force=True)
    engine.close()
    assert rows(state) == ROWS | {b"late": b"1"}


def test_state_that_is_there_is_replaced_only_if_asked(engine: SqliteEngine, state: Path, file: Path):
    backup(state, file, force=False)
    engine.commit({b"late": b"1"})
    engine.close()
    with pytest.raises(StorageError, match=r"exists\. Give --force to replace it"):
        restore(file, state, force=False)
    assert rows(state) == ROWS | {b"late": b"1"}
    restore(file, state, force=True)
    assert rows(state) == ROWS


def test_log_of_a_killed_coordinator_does_not_enter_the_restored_state(
    engine: SqliteEngine, state: Path, file: Path, tmp_path: Path
):
    backup(state, file, force=False)
    engine.commit({b"late": b"1"})
    log = state.with_name("muster.db-wal")
    left = log.read_bytes()
    assert left
    engine.close()
    log.write_bytes(left)
    restore(file, state, force=True)
    assert not log.exists()
    assert rows(state) == ROWS
    log.write_bytes(left)
    state.unlink()
    restore(file, state, force=False)
    assert not log.exists()
    assert rows(state) == ROWS


def test_snapshot_of_the_volume_is_restored_with_its_log(engine: SqliteEngine, state: Path, tmp_path: Path):
    snapshot, elsewhere = tmp_path / "snapshot", tmp_path / "elsewhere.db"
    snapshot.mkdir()
    engine.commit({b"late": b"1"})
    for name in ("muster.db", "muster.db-wal"):
        shutil.copy(state.with_name(name), snapshot)
    restore(snapshot / "muster.db", elsewhere, force=False)
    assert rows(elsewhere) == ROWS | {b"late": b"1"}
    assert epoch(elsewhere) > EPOCH_LEAP


def test_backup_that_is_put_back_again_gives_no_epoch_again(
    engine: SqliteEngine, state: Path, file: Path, monkeypatch: pytest.MonkeyPatch
):
    engine.close()
    backup(state, file, force=False)
    given = []
    for now in (1e9, 1e9 + 600):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        # The volume is lost with all that is on it.
        for one in state.parent.glob(state.name + "*"):
            one.unlink()
        restore(file, state, force=False)
        given.append({epoch(state) for _ in range(3)})
    assert not given[0] & given[1]


@pytest.fixture
def _long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is wrong: epochs go up all the same."""
    monkeypatch.setattr(time, "time", lambda: 0.0)


@pytest.mark.usefixtures("_long_ago")
def test_no_epoch_is_used_twice(engine: SqliteEngine, state: Path, file: Path):
    backup(state, file, force=False)
    engine.close()
    last = [epoch(state) for _ in range(5)][-1]
    assert last == 6
    assert restore(file, state, force=True).epoch == last + EPOCH_LEAP
    assert epoch(state) == last + EPOCH_LEAP + 1
    state.write_bytes(b"damaged beyond reading" * 100)
    assert restore(file, state, force=True).epoch == 1 + EPOCH_LEAP


def test_other_files_are_not_restored(engine: SqliteEngine, state: Path, file: Path):
    engine.close()
    with pytest.raises(StorageError, match="there is no backup at"):
        restore(file, state, force=True)
    file.write_bytes(b"loss=0.25\n" * 1_000)
    with pytest.raises(StorageError, match="not a database"):
        restore(file, state, force=True)
    with pytest.raises(StorageError, match="is the state itself"):
        restore(state, state, force=True)
    assert rows(state) == ROWS
    assert not list(state.parent.glob(".*.partial*"))


def test_after_a_refusal_a_coordinator_can_start(engine: SqliteEngine, state: Path, file: Path):
    engine.close()
    with pytest.raises(StorageError):
        restore(file, state, force=True)
    assert epoch(state) == 2
