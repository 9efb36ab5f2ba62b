"""A save that is written to this node's own disk, for :class:`Checkpointer`."""

import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from muster.checkpoint.committed import Committed, SaveAttempt
from muster.checkpoint.digest import digest_of
from muster.checkpoint.directory import sync, sync_file, write_synced
from muster.checkpoint.local_folder import NOTES
from muster.checkpoint.manifest import MANIFEST, Manifest
from muster.v1 import local_pb2 as pb
from muster.worker.saves.local.folder import LocalFolder
from muster.worker.saves.local.keeper_client import KeeperClient
from muster.worker.saves.local.level import Level
from muster.worker.saves.local.local_calls import LocalCheckpointCalls
from muster.worker.saves.local.room import check_room
from muster.worker.saves.storage.folder_storage import StepWriter
from muster.worker.saves.storage.rank_write import METADATA, RankWrite, written_note
from muster.worker.saves.storage.written import check_files

COMMIT_PART = 0.9
"""Share of a save's timeout that its commit may take on rank 0. The other ranks wait for the whole timeout.
So they hear why a commit failed."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What becomes of a local checkpoint after all ranks have written it."""

    replicas: int
    """On how many further nodes each part is to be."""
    wait_for: Level
    """The level that rank 0 waits for."""
    persist_to: str = ""
    """Where it goes in shared storage; empty: it does not."""
    keep_persisted: int = 0
    """How many checkpoints shared storage keeps; 0: all."""


class LocalStorage:
    """The local tier of one rank's saves.

    Args:
        folder: the keeper's.
        keeper: this node's.
        calls: to the coordinator.
        rank: this process's.
        timeout: seconds for one save.
    """

    def __init__(
        self,
        folder: LocalFolder,
        keeper: KeeperClient,
        calls: LocalCheckpointCalls,
        rank: int,
        timeout: float,
    ) -> None:
        self.folder = folder
        self.keeper = keeper
        self.calls = calls
        self.rank = rank
        self.timeout = timeout
        self.keeper_id = ""
        """The id of the keeper; empty until this rank is attached."""

    def pending(self, attempt: SaveAttempt, terms: Terms) -> "PendingLocal":
        """Return a save."""
        return PendingLocal(self, attempt, terms)


class PendingLocal:
    """A save that is being written. Each rank writes to its own node.

    A save that fails leaves its folder, which the keeper removes when a later one is a checkpoint.

    Args:
        storage: where.
        attempt: the save.
        terms: what becomes of it.
    """

    def __init__(self, storage: LocalStorage, attempt: SaveAttempt, terms: Terms) -> None:
        self._storage = storage
        self._attempt = attempt
        self._terms = terms
        self._path = storage.folder.attempt(attempt)

    @property
    def checkpoint(self) -> Path:
        """Where its files are on this node, committed or not."""
        return self._path

    def begin(self) -> None:
        """Make its folder."""
        (self._path / NOTES).mkdir(parents=True, exist_ok=True)

    def check_room(self, size: int) -> None:
        """Refuse a part that the folder has no room for."""
        check_room(self._path, size)

    def enter(self, rank: int) -> None:
        """Do nothing: no other process removes the folder of a save that may be written."""

    def writer(self) -> StepWriter:
        """Return torch's writer."""
        return StepWriter(self._path, self._path)

    def leave(self, note: str, data: bytes) -> None:
        """Leave a note for other ranks. The keeper of this node serves it."""
        path = self._path / NOTES / note
        try:
            path.write_bytes(data)
        except OSError:
            path.unlink(missing_ok=True)  # Others must not read half of it.
            raise
        sync(self._path)  # The writer has synced the files' content, but not their names.
        sync(self._path.parent)

    def take(self, notes: Sequence[str]) -> list[bytes]:
        """Return what other ranks have left on their nodes."""
        left = [(rank_of(note), note) for note in notes]
        return self._storage.keeper.take(self._attempt, left, self._storage.timeout * COMMIT_PART)

    def has_written(self, rank: int) -> bool:
        """Return whether a rank of this node has written its part here, and said so."""
        return (self._path / NOTES / written_note(rank)).exists()

    def files_of(self, rank: int) -> RankWrite:
        """Return what a rank of this node has written here.

        Raises:
            OSError: it cannot be read.
            ValueError: it says nothing that can be read.
        """
        return RankWrite.decode((self._path / NOTES / written_note(rank)).read_bytes())

    def remove(self, rank: int) -> None:
        """Remove what a rank of this node has written here. The keeper removes what cannot be removed now."""
        for path in (self._path / NOTES / written_note(rank), *self._path.glob(f"__{rank}_*")):
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def copy(self, name: str, path: Path) -> None:
        """Write a file that this rank has written elsewhere."""
        shutil.copyfile(path, self._path / name)
        sync_file(self._path / name)

    def commit(self, made: Committed, manifest: Manifest) -> None:
        """On rank 0, when every rank has written: make it a local checkpoint, for good.

        Raises:
            OSError: a file of this rank is not there as it was written.
            ConnectError: the coordinator has not confirmed it in time, or it does not have the level that
                was waited for. It may be a local checkpoint nevertheless.
            RefusedError: the coordinator refused.
        """
        storage, terms = self._storage, self._terms
        began = time.monotonic()
        own = {name: one.size for name, one in manifest.files.items() if one.rank == storage.rank}
        check_files(self._path, own)
        data = manifest.encode()
        write_synced(self._path / MANIFEST, data)
        sync(self._path)
        checkpoint = described(made, manifest, self._attempt, terms)
        left = storage.timeout * COMMIT_PART - (time.monotonic() - began)
        storage.calls.commit(checkpoint, storage.keeper_id, terms.wait_for, left)


def described(made: Committed, manifest: Manifest, attempt: SaveAttempt, terms: Terms) -> pb.LocalCheckpoint:
    """Return what the coordinator is told of a checkpoint."""
    data = manifest.encode()
    return pb.LocalCheckpoint(
        attempt=pb.Attempt(generation=attempt.generation, number=attempt.number),
        step=made.step,
        world_size=made.world_size,
        manifest_size=len(data),
        manifest_digest=digest_of(data),
        replicas=terms.replicas,
        persist_to=terms.persist_to,
        keep_persisted=terms.keep_persisted,
        size=sum(one.size for name, one in manifest.files.items() if name != METADATA),
    )


def rank_of(note: str) -> int:
    """Return the rank that leaves a note. Rank 0 leaves every ``share``; a rank leaves all others itself.

    Raises:
        ValueError: no rank leaves such a note.
    """
    kind, _, rank = note.rpartition("-")
    return 0 if kind == "share" else int(rank)
