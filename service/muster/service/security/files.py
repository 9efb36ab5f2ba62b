"""What is read from files that others replace while the coordinator runs."""

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog

T = TypeVar("T")

INTERVAL = 1.0
"""Seconds between two looks at the files."""


class FileError(Exception):
    """A file cannot be used. The message says which, why, and what to do next, and holds no secret."""


class Reloaded(Generic[T]):
    """A value made from files, and made again when they change.

    Files are told apart by what ``stat`` says of what their names lead to, so that a swapped symbolic link
    counts as a change. What cannot be loaded is logged once, and tried again at each look; the value stays.

    Args:
        what: what it is, for the log, such as ``certificate``.
        paths: the files.
        load: makes the value.
        changed: is told of each new value.

    Raises:
        FileError: as ``load`` raises it, at the first time.
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

    def look(self) -> None:
        """Make the value again if the files have changed since the last look."""
        # Taken before the files are read: what changes while they are read is a change to the next look.
        seen = self._fingerprint()
        if seen == self._seen:
            self._complaint = ""
            return
        log = structlog.get_logger()
        try:
            value = self._load()
        except Exception as error:  # Whatever is wrong with a file, the last good one goes on.
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
    """The bytes of a file.

    Raises:
        FileError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise FileError(
            f"{path} cannot be read: {error.strerror or error}. Check the path, and that the coordinator's "
            "user may read it."
        ) from error


async def keep_fresh(reloaded: Iterable[Reloaded[Any]], interval: float = INTERVAL) -> None:
    """Look at all files again and again, for ever.

    Args:
        reloaded: what is made from them.
        interval: seconds between two looks.
    """
    values = list(reloaded)
    while True:
        await asyncio.sleep(interval)
        for one in values:
            one.look()
