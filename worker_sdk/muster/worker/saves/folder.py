"""A job's checkpoints in a folder that all ranks share, for :class:`Checkpointer`."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.storage import StorageReader

from muster.worker.saves.committed import Committed, Life
from muster.worker.saves.directory import CheckpointDirectory, sync
from muster.worker.saves.written import check_files

NOTES = ".ranks"
"""In a save that is not committed: what ranks tell each other."""


class FolderPlace:
    """The checkpoints of one job in a folder.

    Args:
        folder: it is made if it is not there.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._directory = CheckpointDirectory(folder)

    def take_over(self, keep_last: int | None) -> None:
        """Remove what earlier lives of the job have left."""
        self._directory.sweep(keep_last)

    def draft(self, step: int, life: Life) -> "FolderDraft":
        """A save."""
        return FolderDraft(
            self._directory, self._directory.unfinished(step, life), self._directory.path(step)
        )

    def committed(self, step: int) -> Path | None:
        """The checkpoint of a step."""
        path = self._directory.path(step)
        return path if path.exists() else None

    def latest(self) -> Committed | None:
        """The committed checkpoint of the highest step."""
        return self._directory.latest()

    def read(self, path: Path | str) -> Committed:
        """What a checkpoint is, here or elsewhere."""
        if "://" in str(path):
            raise ValueError(
                f"{path} is in a bucket, and this Checkpointer's checkpoints are in "
                f"{self._directory.folder}. Load it by a Checkpointer of that bucket."
            )
        return self._directory.read(Path(path))

    def reader(self, made: Committed) -> StorageReader:
        """Torch's reader of a checkpoint."""
        return FileSystemReader(made.path)

    def sweep(self, keep_last: int | None, decided: Life) -> None:
        """Remove what failed saves have left, and all but the last checkpoints."""
        self._directory.sweep(keep_last, decided)


class FolderDraft:
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

    def enter(self, rank: int) -> None:
        """Nothing: who has removed the folder has removed what is to be renamed."""

    def writer(self) -> FileSystemWriter:
        """Torch's writer. It copies nothing ahead, for which torch would ask for a stream of the GPU."""
        return FileSystemWriter(
            self._unfinished, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0
        )

    def leave(self, note: str, data: bytes) -> None:
        """Tell other ranks something."""
        path = self._unfinished / NOTES / note
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        sync(self._unfinished)  # Torch has put what is in its files on the disk, and not their names.

    def take(self, notes: Sequence[str]) -> list[bytes]:
        """What other ranks have left."""
        return [self._taken(self._unfinished / NOTES / note) for note in notes]

    def _taken(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{path}, which another rank has written, is not there: all ranks must save the same steps "
                "in the same order, in one folder that they share."
            ) from error

    def commit(self, made: Committed, files: Mapping[str, int]) -> None:
        """Give it its name."""
        check_files(self._unfinished, files)
        shutil.rmtree(self._unfinished / NOTES)
        self._directory.commit(self._unfinished, made)
