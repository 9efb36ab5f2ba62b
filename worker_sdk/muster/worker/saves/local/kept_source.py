"""Reads the files of a local checkpoint through the keeper of this node."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.damage import Damage, DamageError
from muster.checkpoint.source import FolderSource, OpenFile
from muster.worker.saves.local.keeper_client import KeeperClient
from muster.worker.saves.local.keeper_process import KeeperError
from muster.worker.saves.local.remote_file import RemoteFile, RemotePlace


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
        is_damaged = name in self._damaged
        place = self._place_of(name)
        if isinstance(place, Path):
            with FolderSource(place.parent).open(place.name) as here:
                yield here
            return
        with self._lock:
            there = self._remote.get(name)
            if there is None:
                there = self._remote[name] = RemoteFile(place, verify=is_damaged)
        try:
            yield there
        except FileNotFoundError as error:
            raise DamageError(Damage.found(name, str(error))) from error

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

    def _place_of(self, name: str) -> Path | RemotePlace:
        with self._lock:  # A file is fetched once.
            place = self._known.get(name)
            if place is not None and not (isinstance(place, Path) and not place.exists()):
                return place
            damaged = name in self._damaged
            left = max(self._deadline - time.monotonic(), 1.0)
            try:
                place = self._keeper.find(self._attempt, name, left, damaged=damaged)
            except (FileNotFoundError, KeeperError) as error:
                raise DamageError(Damage.found(name, str(error))) from error
            self._damaged.discard(name)
            self._known[name] = place
            return place
