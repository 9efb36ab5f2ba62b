"""Reads the files of a local checkpoint through the keeper of this node."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.damage import Damage, DamageError
from muster.checkpoint.source import FolderSource, OpenFile
from muster.worker.saves.local.keeper_client import KeeperClient
from muster.worker.saves.local.keeper_process import KeeperError
from muster.worker.saves.local.remote_file import RemoteFile, RemotePlace

logger = logging.getLogger(__name__)


class KeptSource:
    """The files of one local checkpoint. Threads may share it.

    Args:
        keeper: this node's.
        attempt: the checkpoint.
        folder: where its files are on this node.
        timeout: seconds for all fetches together.
    """

    def __init__(self, keeper: KeeperClient, attempt: SaveAttempt, folder: Path, timeout: float) -> None:
        self._keeper = keeper
        self._attempt = attempt
        self._folder = folder
        self._deadline = time.monotonic() + timeout
        self._known: dict[str, Path | RemotePlace] = {}
        """By name: the place that the keeper has named."""
        self._remote: dict[str, RemoteFile] = {}
        """By name: files of other nodes, with their connections. A load opens a file for each item."""
        self._damaged: set[str] = set()
        """Files from which wrong bytes were read, of which the keeper does not know yet."""
        self._lock = threading.Lock()
        self._finding: dict[str, threading.Lock] = {}
        """By name: held while the keeper is asked for the file, so that it is asked once."""

    @property
    def place(self) -> str:
        """The checkpoint's folder on this node."""
        return str(self._folder)

    def sizes(self) -> dict[str, int]:
        """Return the files that are on this node, and their sizes in bytes."""
        return FolderSource(self._folder).sizes()

    @contextmanager
    def open(self, name: str) -> Iterator[OpenFile]:
        """Open a file of this node, or of another one.

        If the caller finds damage in it, the keeper verifies it again before the file is opened again.

        Raises:
            DamageError: the keeper cannot get it whole.
            OSError: it cannot be opened.
        """
        try:
            with self._opened(name) as file:
                yield file
        except DamageError:
            self.distrust(name)
            raise

    @contextmanager
    def _opened(self, name: str) -> Iterator[OpenFile]:
        place = self._place_of(name)
        if isinstance(place, Path):
            with FolderSource(place.parent).open(place.name) as here:
                yield here
        else:
            yield _FileElsewhere(partial(self._read_elsewhere, name))

    def _read_elsewhere(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from a file that other nodes have.

        If none of them sends it, the keeper is asked where it is now: a node may have another port or token
        since. If that fails, too, the keeper is to fetch the file.

        Raises:
            DamageError: the keeper cannot get it whole.
            OSError: it cannot be opened.
        """
        place = self._place_of(name)
        for pieces in (True, False):
            if isinstance(place, Path):
                break
            try:
                return self._remote_at(name, place).read_into(offset, buffer)
            except FileNotFoundError as error:
                logger.warning("asking the keeper again for %s: %s", name, error)
                place = self._place_of(name, instead_of=place, pieces=pieces)
        if not isinstance(place, Path):
            raise DamageError(Damage.found(name, f"none of {', '.join(place.urls)} sends it"))
        with FolderSource(place.parent).open(place.name) as here:
            return here.read_into(offset, buffer)

    def _remote_at(self, name: str, place: RemotePlace) -> RemoteFile:
        with self._lock:
            known = self._remote.get(name)
            if known is None or known.place != place:
                known = self._remote[name] = RemoteFile(place)
            return known

    def distrust(self, name: str) -> None:
        """Record that wrong bytes were read from a file."""
        with self._lock:
            self._known.pop(name, None)
            self._damaged.add(name)
            remote = self._remote.pop(name, None)
        if remote is not None:
            remote.close()

    def close(self) -> None:
        """Close the connections to other nodes. A file that is opened later opens its own again."""
        with self._lock:
            remote, self._remote = self._remote, {}
        for one in remote.values():
            one.close()

    def look_again(self, name: str) -> None:
        """Have the keeper verify a file again now, if wrong bytes were read from it."""
        self.distrust(name)
        with suppress(DamageError, OSError), self._opened(name) as file:
            file.read(0, 1)

    def _place_of(
        self, name: str, *, instead_of: RemotePlace | None = None, pieces: bool = True
    ) -> Path | RemotePlace:
        """Return the place of a file; ask the keeper if it is not known.

        Args:
            name: the file.
            instead_of: a place that no longer has it.
            pieces: whether the file may stay on other nodes.

        Raises:
            DamageError: the keeper cannot get it whole.
        """
        with self._lock:
            finding = self._finding.setdefault(name, threading.Lock())
        with finding:
            with self._lock:
                place, damaged = self._known.get(name), name in self._damaged
            if (
                place is not None
                and place != instead_of
                and (isinstance(place, RemotePlace) or place.exists())
            ):
                return place
            left = max(self._deadline - time.monotonic(), 1.0)
            try:
                place = self._keeper.find(self._attempt, name, left, damaged=damaged, pieces=pieces)
            except (FileNotFoundError, KeeperError) as error:
                raise DamageError(Damage.found(name, str(error))) from error
            with self._lock:
                self._damaged.discard(name)
                self._known[name] = place
                former = self._remote.pop(name, None)
                if damaged and isinstance(place, RemotePlace):
                    self._remote[name] = RemoteFile(place, verify=True)
            if former is not None:
                former.close()
            return place


class _FileElsewhere:
    """A file on other nodes, open for reading.

    Args:
        read_into: fills a buffer from an offset on.
    """

    def __init__(self, read_into: Callable[[int, memoryview], int]) -> None:
        self.read_into = read_into

    def read(self, offset: int, length: int) -> bytes:
        """Return up to ``length`` bytes from an offset on; fewer only at the file's end."""
        buffer = bytearray(length)
        return bytes(buffer[: self.read_into(offset, memoryview(buffer))])
