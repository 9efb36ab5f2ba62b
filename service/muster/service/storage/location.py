"""Selection of the engine by the value of ``--state``."""

from pathlib import Path

from muster.service.etcd.location import SCHEME, Location
from muster.service.storage.engine import Engine, StorageError
from muster.service.storage.memory import MemoryEngine
from muster.service.storage.sqlite import SqliteEngine

SQLITE_SCHEME = "sqlite:///"


def engine_for(location: str) -> Engine:
    """Return the engine for ``memory:`` or ``sqlite:///path`` (``sqlite:////path`` is absolute).

    Raises:
        StorageError: the location names no engine.
    """
    if location == "memory:":
        return MemoryEngine()
    path = sqlite_path(location)
    if path is not None:
        return SqliteEngine(path)
    raise StorageError(
        f'--state "{location}" names no storage. Use memory:, sqlite:///muster.db '
        "(sqlite:////var/lib/muster.db for an absolute path), or etcd://HOST:PORT/PREFIX."
    )


def check_location(location: str) -> None:
    """Check that a location is valid, for every kind of storage.

    Raises:
        StorageError: the location names no engine.
    """
    if not location.startswith(SCHEME):
        engine_for(location)
        return
    try:
        Location.parse(location)
    except ValueError as error:
        raise StorageError(f"--state: {error}.") from None


def sqlite_path(location: str) -> Path | None:
    """Return the file of a SQLite state; None: the location names another kind of state."""
    path = Path(location.removeprefix(SQLITE_SCHEME))
    return path if location.startswith(SQLITE_SCHEME) and path.name else None
