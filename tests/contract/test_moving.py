"""A state moves from SQLite to etcd and back, with all that it holds."""

from pathlib import Path

import pytest

from lab.leaders import client, successive_leaders, take_the_lead
from lab.processes.etcd import Cluster
from muster.service.etcd.location import Location
from muster.service.storage import moving
from muster.service.storage.backup import backup, read, restore
from muster.service.storage.engine import StorageError
from muster.service.storage.etcd import EtcdEngine
from muster.service.storage.sqlite import SqliteEngine
from tests.support.expect import raising

ROWS = {
    b"run\0job1": b"1",
    b"decision\0job1\0checkpoint\x000": b"\0\xff" * 500_000,
    b"storekey\0job1\0k": b"",
}


@pytest.fixture
def state(etcd: Cluster, request: pytest.FixtureRequest) -> str:
    return etcd.state(request.node.name)


def sqlite_state(path: Path, rows: dict[bytes, bytes]) -> int:
    """Make one; returns its epoch."""
    engine = SqliteEngine(path)
    epoch = engine.open()
    engine.commit(rows)
    engine.close()
    return epoch


def rows_in(state: str) -> tuple[dict[bytes, bytes], int]:
    """What a replica that takes over finds, and its epoch."""
    with successive_leaders(state) as leaders:
        engine = leaders()
        epoch = engine.open()
        return dict(engine.scan()), epoch


def test_from_sqlite_to_etcd_and_back(state: str, tmp_path: Path):
    sqlite_state(tmp_path / "muster.db", ROWS)
    backup(tmp_path / "muster.db", tmp_path / "one", force=False)
    location = Location.parse(state)
    moved = moving.restore_into(client(location), location, tmp_path / "one", force=False)
    assert moved.runs == 1
    found, epoch = rows_in(state)
    assert found == ROWS
    assert epoch == moved.epoch + 1
    taken = moving.backup_from(client(location), location, tmp_path / "two", force=False)
    assert (taken.runs, taken.epoch) == (1, epoch)
    back = restore(tmp_path / "two", tmp_path / "muster.db", force=True)
    assert back.epoch > epoch
    engine = SqliteEngine(tmp_path / "muster.db")
    assert engine.open() == back.epoch + 1
    assert dict(engine.scan()) == ROWS
    engine.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["muster.db", "muster.db.lock", "one", "two"]


def test_state_that_is_led_is_not_replaced(state: str, tmp_path: Path):
    sqlite_state(tmp_path / "one", ROWS)
    location = Location.parse(state)
    etcd = client(location)
    lead = take_the_lead(etcd, location)
    with pytest.raises(StorageError, match=r"a replica leads .* Stop all replicas first"):
        moving.restore_into(etcd, location, tmp_path / "one", force=True)
    lead.lease.give_up()
    moving.restore_into(etcd, location, tmp_path / "one", force=False)
    with pytest.raises(StorageError, match=r"there is a state at .* --force"):
        moving.restore_into(etcd, location, tmp_path / "one", force=False)
    moving.restore_into(etcd, location, tmp_path / "one", force=True)
    assert rows_in(state)[0] == ROWS


def test_restore_replaces_the_old_state(state: str, tmp_path: Path):
    with successive_leaders(state) as leaders:
        engine = leaders()
        engine.open()
        engine.commit({b"old\0%d" % number: b"1" for number in range(300)})
    sqlite_state(tmp_path / "one", ROWS)
    location = Location.parse(state)
    moving.restore_into(client(location), location, tmp_path / "one", force=True)
    assert rows_in(state)[0] == ROWS


def test_backup_includes_a_complete_journal(state: str, tmp_path: Path):
    location = Location.parse(state)
    with successive_leaders(state) as leaders:
        engine = leaders()
        engine.open()
        before = {b"old/%d" % number: b"1" for number in range(10)}
        engine.commit(before)
        after = {b"%04d" % number: b"2" for number in range(250)}
        fall_before_carrying_out(engine)
        with pytest.raises(InterruptedError):
            engine.commit({**after, b"old/3": None}, [b"old/"])
        moving.backup_from(client(location), location, tmp_path / "one", force=False)
        assert read(tmp_path / "one")[0] == after


def fall_before_carrying_out(engine: EtcdEngine) -> None:
    engine._carry_out = raising(InterruptedError)  # type: ignore[method-assign]


def test_nothing_is_backed_up_where_there_is_no_state(state: str, tmp_path: Path):
    location = Location.parse(state)
    with pytest.raises(StorageError, match="there is no state at"):
        moving.backup_from(client(location), location, tmp_path / "one", force=False)
    assert list(tmp_path.iterdir()) == []


def test_other_files_are_refused_as_backups(state: str, tmp_path: Path):
    location = Location.parse(state)
    (tmp_path / "one").write_bytes(b"not a database, and longer than its header is " * 10)
    with pytest.raises(StorageError, match="damaged or not a database"):
        moving.restore_into(client(location), location, tmp_path / "one", force=False)
    with pytest.raises(StorageError, match="there is no backup at"):
        moving.restore_into(client(location), location, tmp_path / "two", force=False)
