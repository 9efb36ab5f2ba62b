from pathlib import Path

import pytest

from muster.service.storage.engine import StorageError
from muster.service.storage.location import engine_for
from muster.service.storage.memory import MemoryEngine
from muster.service.storage.sqlite import SqliteEngine


def test_memory_is_named_by_its_scheme():
    assert isinstance(engine_for("memory:"), MemoryEngine)


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("sqlite:///muster.db", "muster.db"),
        ("sqlite:///state/muster.db", "state/muster.db"),
        ("sqlite:////var/lib/muster.db", "/var/lib/muster.db"),
        ("sqlite:///odd name?mode=ro#x", "odd name?mode=ro#x"),
    ],
)
def test_sqlite_takes_three_slashes_and_a_path(location: str, path: str):
    engine = engine_for(location)
    assert isinstance(engine, SqliteEngine)
    assert engine.path == Path(path)


@pytest.mark.parametrize(
    "location",
    [
        "",
        "muster.db",
        "memory",
        "memory:x",
        "Memory:",
        "sqlite:",
        "sqlite:muster.db",
        "sqlite://muster.db",
        "sqlite:///",
        "sqlite:////",
        "sqlite:///.",
        "etcd://127.0.0.1:2379",
    ],
)
def test_unknown_storage_is_refused_with_an_example(location: str):
    with pytest.raises(StorageError) as caught:
        engine_for(location)
    assert f'"{location}" names no storage' in str(caught.value)
    assert "sqlite:///muster.db" in str(caught.value)
