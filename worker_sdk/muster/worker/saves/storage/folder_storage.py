"""A job's checkpoints in a folder that all ranks share, for :class:`Checkpointer`."""

import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from muster.checkpoint.committed import (
    MARKER,
    NO_STEP,
    Committed,
    SaveAttempt,
    UncommittedError,
    committed_by_adapter,
    unseal,
)
from muster.checkpoint.containment import followed, path_in
from muster.checkpoint.damage import DamageError, damage_in
from muster.checkpoint.digest import Segment
from muster.checkpoint.directory import CheckpointDirectory, sync, sync_file, write_synced
from muster.checkpoint.manifest import MANIFEST, Manifest, ManifestReference
from muster.checkpoint.retry import ABSENT, exists, retrying
from muster.checkpoint.source import FolderSource
from muster.worker.saves.storage.checkpoint_storage import Newest
from muster.worker.saves.storage.digesting import DigestingFiles
from muster.worker.saves.storage.written import check_files

NOTES = ".ranks"
"""In a save that is not committed: what ranks tell each other."""
UNMARKED = "this process found it damaged, and could not mark it"


class FolderStorage(CheckpointDirectory):
    """A folder of checkpoints that torch writes and reads. Arguments and errors are those of the base."""

    def take_over(self) -> None:
        """Remove what earlier lives of the job have left, and did not commit."""
        self.sweep(None)

    def pending(self, step: int, attempt: SaveAttempt) -> "PendingFolder":
        """Return a save."""
        return PendingFolder(self, self.unfinished(step, attempt), self.path(step))

    def committed(self, step: int) -> Path | None:
        """Return the checkpoint of a step that no other may replace."""
        path = self.path(step)
        if not exists(path):
            return None
        entry = self.entry(path)
        return None if entry is not None and entry.replaceable else path

    def newest(self, excluded: Collection[str]) -> Newest:
        """Return the whole checkpoint that was committed last, and what is damaged."""
        damaged: list[str] = []
        for entry in reversed(self.entries()):
            if entry.whole and str(entry.path) not in excluded:
                return Newest(entry.made, tuple(damaged))
            damaged.append(f"{entry.path}: {entry.damage or UNMARKED}")
        return Newest(None, tuple(damaged))

    def read(self, path: Path | str) -> Committed:
        """Return what a checkpoint is, here or elsewhere."""
        if "://" in str(path):
            raise ValueError(
                f"{path} is in a bucket, and this Checkpointer's checkpoints are in {self.folder}. "
                "Load it by a Checkpointer of that bucket."
            )
        # A link may be moved during the load: its new target is not to be read, nor marked as damaged.
        path = followed(Path(path))
        if (damage := damage_in(path)) is not None:
            raise DamageError(damage)
        try:
            return super().read(path)
        except UncommittedError:
            if (made := _adapters(path)) is None:
                raise
            return made

    def resolve_name(self, name: str, beside: Path | str | None = None) -> Path:
        """Return where the checkpoint is that rank 0 named."""
        return path_in(self.folder if beside is None else followed(Path(beside)).parent, name)

    def source(self, made: Committed) -> FolderSource:
        """Return what a checkpoint's files are read from."""
        return FolderSource(Path(made.path))


def _adapters(path: Path) -> Committed | None:
    """Return a checkpoint that a ``CommittedWriter`` made; None if the path is not one.

    Its marker names no step, so the number at the end of its name counts as the step.
    """
    try:
        made = committed_by_adapter(unseal(retrying(str(path), (path / MARKER).read_bytes)), path)
    except (*ABSENT, ValueError):
        return None
    return made if made.step != NO_STEP else replace(made, step=0)


class StepWriter(FileSystemWriter):
    """Torch's writer of a pending checkpoint; torch's metadata names the later one.

    It copies nothing ahead, for which torch would ask for a stream of the GPU. It syncs each file when it
    closes it, at its final size. Torch itself syncs the metadata before it is flushed.

    Args:
        unfinished: where it writes.
        checkpoint: where the files will be when they are committed.
    """

    def __init__(self, unfinished: Path, checkpoint: Path) -> None:
        super().__init__(unfinished, single_file_per_rank=True, sync_files=False, per_thread_copy_ahead=0)
        self._files = DigestingFiles()
        self.fs = self._files
        self._checkpoint = checkpoint

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Torch's."""
        return self._checkpoint

    @property
    def written(self) -> Mapping[str, tuple[Segment, ...]]:
        """By name, the segments of each file that this writer has written."""
        return self._files.written


class PendingFolder:
    """A save that is being written.

    Args:
        directory: where.
        unfinished: its folder until it is committed.
        checkpoint: its name then.
    """

    def __init__(self, directory: CheckpointDirectory, unfinished: Path, checkpoint: Path) -> None:
        self._directory = directory
        self._unfinished = unfinished
        self._checkpoint = checkpoint

    @property
    def checkpoint(self) -> Path:
        """Where it will be when it is committed."""
        return self._checkpoint

    def begin(self) -> None:
        """Make its folder."""
        self._unfinished.mkdir(parents=True, exist_ok=True)

    def check_room(self, size: int) -> None:
        """Do nothing: a shared disk that is full fails the write."""

    def enter(self, rank: int) -> None:
        """Do nothing: if a process removes the folder, nothing is left to rename."""

    def writer(self) -> StepWriter:
        """Return torch's writer."""
        return StepWriter(self._unfinished, self._checkpoint)

    def copy(self, name: str, path: Path) -> None:
        """Write a file that this rank has written elsewhere, and sync it."""
        shutil.copyfile(path, self._unfinished / name)
        sync_file(self._unfinished / name)

    def leave(self, note: str, data: bytes) -> None:
        """Tell other ranks something."""
        path = self._unfinished / NOTES / note
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        sync(self._unfinished)  # The writer has synced the files' content, but not their names.

    def take(self, notes: Sequence[str]) -> list[bytes]:
        """Return what other ranks have left."""
        return [self._taken(self._unfinished / NOTES / note) for note in notes]

    def _taken(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{path}, which another rank has written, is not there: all ranks must save the same steps "
                "in the same order, in one folder that they share."
            ) from error

    def commit(self, made: Committed, manifest: Manifest) -> None:
        """Give it its name."""
        check_files(self._unfinished, {name: entry.size for name, entry in manifest.files.items()})
        shutil.rmtree(self._unfinished / NOTES)
        data = manifest.encode()
        write_synced(self._unfinished / MANIFEST, data)
        self._directory.commit(self._unfinished, replace(made, manifest=ManifestReference.of(data)))
