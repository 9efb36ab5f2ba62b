"""Values from files that others replace while the coordinator runs."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog

T = TypeVar("T")

INTERVAL = 1.0
"""Seconds between two checks of the files."""


class FileError(Exception):
    """A file cannot be used. The message says which, why, and what to do next. It has no secret."""


class Reloaded(Generic[T]):
    """A value that is loaded from files, and loaded again when they change.

    A change is a new result of ``stat`` for a path, which follows symbolic links. If a file cannot be loaded,
    the value stays. The error is logged once, and each check tries again.

    Args:
        what: the name of the value in the log, such as ``certificate``.
        paths: the files.
        load: loads the value.
        changed: is called with each new value.

    Raises:
        FileError: the first ``load`` raised it.
    """

    def __init__(
        self,
        what: str,
        paths: Iterable[Path],
        load: Callable[[], T],
        changed: Callable[[T], None] | None = None,
    ) -> None:
        self._what = what
        self._paths = tuple(paths)
        self._load = load
        self.changed = changed
        self._seen = self._fingerprint()
        self._complaint = ""
        self.value = load()

    def _fingerprint(self) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(map(_fingerprint, self._paths))

    @property
    def what(self) -> str:
        """The name of the value."""
        return self._what

    @property
    def failed(self) -> bool:
        """Whether the newest files could not be loaded, so that an older value is in force."""
        return bool(self._complaint)

    def look(self) -> None:
        """Load the value again if the files have changed since the last check."""
        # Before reading the files, so that the next check sees a change during the read.
        seen = self._fingerprint()
        if seen == self._seen:
            self._complaint = ""
            return
        log = structlog.get_logger()
        try:
            value = self._load()
        except Exception as error:  # Whatever is wrong with a file, the last good value stays.
            why = str(error) if isinstance(error, FileError) else f"{type(error).__name__}: {error}."
            if why != self._complaint:
                log.error(f"{self._what}.kept", reason=f"{why} What was loaded before stays in force.")  # noqa: TRY400
                self._complaint = why
            return
        self._seen, self._complaint = seen, ""
        self.value = value
        log.info(f"{self._what}.reloaded", files=[str(path) for path in self._paths])
        if self.changed is not None:
            self.changed(value)


def _fingerprint(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read(path: Path) -> bytes:
    """Read a file.

    Raises:
        FileError: the file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(
            f"{path} cannot be read: {error.strerror or error}. Check the path, and that the coordinator's "
            "user may read it."
        ) from error


async def keep_fresh(reloaded: Iterable[Reloaded[Any]], interval: float = INTERVAL) -> None:
    """Check all files periodically, for ever.

    Args:
        reloaded: the values of the files.
        interval: seconds between two checks.
    """
    values = list(reloaded)
    while True:
        await asyncio.sleep(interval)
        for one in values:
            one.look()
