"""A save to the nodes' own disks, or to shared storage if a node has no room.

A rank whose folder has no room writes its part to shared storage, in the same child. It says so beside its
vote that it has written, so that all ranks hear it in one decision. Then the others copy their parts there,
all ranks meet, and rank 0 commits the save in shared storage.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from muster.checkpoint.committed import Committed, SaveAttempt
from muster.checkpoint.damage import DamageError
from muster.checkpoint.manifest import FileEntry, Manifest
from muster.checkpoint.source import FolderSource
from muster.checkpoint.verification import verify
from muster.worker.errors import MusterError
from muster.worker.saves.failure import failure_text
from muster.worker.saves.local.local_calls import LocalCheckpointCalls
from muster.worker.saves.local.local_storage import COMMIT_PART, PendingLocal, Terms, described
from muster.worker.saves.local.room import lacks_room, shortage
from muster.worker.saves.local.settling import settle
from muster.worker.saves.storage.checkpoint_storage import (
    CheckpointStorage,
    PendingCheckpoint,
    PendingWriter,
)
from muster.worker.saves.storage.rank_write import written_note

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """Shared storage, as a local save uses it.

    Args:
        storage: the job's, opened when it is needed.
        opens: opens it once more, in a forked child.
        folder: its name, as keepers are told it.
        calls: to the coordinator.
        meet: has all ranks meet. It takes why this one fails, and raises if one has failed.
        timeout: seconds for one save.
    """

    storage: CheckpointStorage
    opens: Callable[[], CheckpointStorage]
    folder: str
    calls: LocalCheckpointCalls
    meet: Callable[[str | None], None]
    timeout: float


class TieredSave:
    """One rank's part in a save to the nodes' disks, or to shared storage.

    Args:
        local: the save on this node.
        place: shared storage.
        rank: this process's.
        step: the step.
        attempt: the attempt.
        terms: what becomes of the save.
        attach: has this node's keeper keep for this rank; starts one if it has ended.
        full: why this rank does not try its own disk; empty: it does.
    """

    def __init__(
        self,
        local: PendingLocal,
        place: SharedPlace,
        rank: int,
        step: int,
        attempt: SaveAttempt,
        terms: Terms,
        attach: Callable[[], None],
        full: str = "",
    ) -> None:
        self._local = local
        self._place = place
        self._rank = rank
        self._step = step
        self._attempt = attempt
        self._terms = replace(terms, persist_to=place.folder)
        self._attach = attach
        self._owner = os.getpid()
        self._size = 0
        self._shared: PendingCheckpoint | None = None
        self.full = full
        """Why this rank's part is not on its own disk; empty: it is, as far as is known."""
        self.has_failed = False
        """Whether the commit has failed on this rank, because its disk is full."""
        self.is_swept = False

    # ------------------------------------------------------------------ before the fork

    def begin(self) -> None:
        """Make its folder."""
        self._unless_full(self._local.begin)

    def check_room(self, size: int) -> None:
        """Note whether the folder has room for this rank's part."""
        self._size = size
        self._unless_full(lambda: self._local.check_room(size))

    def _unless_full(self, what: Callable[[], None]) -> None:
        try:
            if not self.full:
                what()
        except (OSError, MemoryError) as error:
            if not lacks_room(error):
                raise
            self.full = (error.strerror if isinstance(error, OSError) else None) or str(error)

    # ------------------------------------------------------------------ notes of the plan

    def enter(self, rank: int) -> None:
        """Do nothing before something is left."""

    def leave(self, note: str, data: bytes) -> None:
        """Tell other ranks something, through shared storage if there is no room here."""
        left = False

        def leave_here() -> None:
            nonlocal left
            self._local.leave(note, data)
            left = True

        self._unless_full(leave_here)
        if not left:
            self._in_shared().leave(note, data)

    def take(self, notes: Sequence[str]) -> list[bytes]:
        """Return what other ranks have left, wherever they had room."""
        try:
            return self._local.take(notes)
        except FileNotFoundError as error:
            try:
                return [self._taken(note) for note in notes]
            except OSError as absent:
                logger.info("a note is not in shared storage, either: %s", absent)
                raise error from None

    def _taken(self, note: str) -> bytes:
        try:
            return self._local.take([note])[0]
        except FileNotFoundError:
            return self._in_shared().take([note])[0]

    # ------------------------------------------------------------------ in the child

    def write(self, write_part: Callable[[PendingCheckpoint], None]) -> None:
        """Write this rank's part: here, or to shared storage if there is no room."""
        if not self.full:
            try:
                write_part(self._local)
                return
            except BaseException as error:
                if not lacks_room(error):
                    raise
            self._local.remove(self._rank)
        write_part(self._in_shared())

    # ------------------------------------------------------------------ when it is written

    def word(self) -> bytes:
        """Return why this rank's part is in shared storage; empty if it is on this node."""
        if self._local.has_written(self._rank):
            return b""
        self.full = self.full or shortage(self._local.checkpoint.parent, self._size)
        return f"rank {self._rank} ({socket.gethostname()}): {self.full}".encode()

    def agreed(self, words: Mapping[int, bytes]) -> PendingCheckpoint:
        """Return where the save is committed. If a rank had no room, bring this rank's part there first.

        Raises:
            Exception: a rank cannot bring its part there.
        """
        self._attach()
        if not words:
            return self._local
        if self._rank in (0, *words):
            said = words.get(self._rank) or next(iter(words.values()))
            logger.warning(
                "step %d goes to %s, since %d of the ranks had no room for local copies. %s",
                self._step,
                self._place.folder,
                len(words),
                said.decode("utf-8", "replace"),
            )
        failure: str | None = None
        shared: PendingCheckpoint | None = None
        try:
            shared = self._in_shared()
            if self._rank not in words:
                self._copy_to(shared)
        except BaseException as error:  # The others wait for this rank, whatever happens to it.
            failure = failure_text(error)
        self._place.meet(failure)
        assert shared is not None
        self._local.remove(self._rank)
        self.is_swept = True
        return SharedCommit(shared, self._place, self._step, self._attempt, self._terms)

    def _copy_to(self, shared: PendingCheckpoint) -> None:
        wrote = self._local.files_of(self._rank)
        files = {name: FileEntry(segments, self._rank) for name, segments in wrote.files.items()}
        folder = self._local.checkpoint
        for checked in verify(FolderSource(folder), Manifest(files), threads=1):
            for damage in checked.damages:
                raise DamageError(damage)
        for name in files:
            shared.copy(name, folder / name)
        shared.leave(written_note(self._rank), wrote.encode())

    def failed(self, error: BaseException) -> None:
        """Note that this rank's disk is full: its next part does not go there."""
        if lacks_room(error):
            self.has_failed = True
            self.full = self.full or shortage(self._local.checkpoint.parent, self._size)

    def _in_shared(self) -> PendingCheckpoint:
        """Return the save in shared storage, which this rank has entered."""
        if self._shared is None:
            # In a child, another thread of its parent may hold what guards the storage.
            storage = self._place.storage if os.getpid() == self._owner else self._place.opens()
            self._shared = storage.pending(self._step, self._attempt)
            self._shared.begin()
            self._shared.enter(self._rank)
        return self._shared


class SharedCommit:
    """A save whose ranks have written it to shared storage, with the coordinator's permit.

    Args:
        shared: the save there.
        place: shared storage.
        step: the step.
        attempt: the attempt.
        terms: what becomes of it.
    """

    def __init__(
        self, shared: PendingCheckpoint, place: SharedPlace, step: int, attempt: SaveAttempt, terms: Terms
    ) -> None:
        self._shared = shared
        self._place = place
        self._step = step
        self._attempt = attempt
        self._terms = terms

    @property
    def checkpoint(self) -> Path | str:
        """Where it will be when it is committed."""
        return self._shared.checkpoint

    def begin(self) -> None:
        """See :class:`PendingCheckpoint`, as for all methods."""
        self._shared.begin()

    def check_room(self, size: int) -> None:
        """Refuse a part that there is certainly no room for."""
        self._shared.check_room(size)

    def enter(self, rank: int) -> None:
        """Say that a rank is about to write."""
        self._shared.enter(rank)

    def writer(self) -> PendingWriter:
        """Return torch's writer."""
        return self._shared.writer()

    def copy(self, name: str, path: Path) -> None:
        """Write a file that this rank has written elsewhere."""
        self._shared.copy(name, path)

    def leave(self, note: str, data: bytes) -> None:
        """Tell other ranks something."""
        self._shared.leave(note, data)

    def take(self, notes: Sequence[str]) -> list[bytes]:
        """Return what other ranks have left."""
        return self._shared.take(notes)

    def commit(self, made: Committed, manifest: Manifest) -> None:
        """On rank 0: commit it in shared storage.

        The coordinator knows before that it may be there, and after that it is.

        Raises:
            FileExistsError: another checkpoint of the step is there.
            OSError: it cannot be committed.
            MusterError: the coordinator does not permit it, or cannot be reached.
        """
        place, deadline = self._place, time.monotonic() + self._place.timeout * COMMIT_PART
        there = place.storage.committed(self._step)
        if there is not None:
            raise FileExistsError(f"step {self._step} is committed already, as {there}. Save another step.")
        checkpoint = described(made, manifest, self._attempt, self._terms)
        older = place.calls.commit_shared(checkpoint, "", deadline - time.monotonic())
        settle(place.storage, place.folder, older)
        self._shared.commit(made, manifest)
        try:
            place.calls.commit_shared(checkpoint, str(self.checkpoint), deadline - time.monotonic())
        except MusterError as error:
            # It is committed. A recovery looks there, since the coordinator has permitted it.
            logger.warning("the coordinator has not heard that step %d is committed: %s", self._step, error)
