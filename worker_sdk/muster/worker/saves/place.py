"""Where a job's checkpoints are, as far as saving and loading must know: a folder, or a bucket."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.storage import StorageReader

from muster.worker.saves.committed import Committed, Life


class Draft(Protocol):
    """A save that is being written. Each rank, and each child of it, has one of the same name."""

    @property
    def checkpoint(self) -> Path | str:
        """Where it will be when it is committed."""

    def begin(self) -> None:
        """Make room for it. Nothing here may wait for a network.

        Raises:
            OSError: there is none.
        """

    def enter(self, rank: int) -> None:
        """Say that a rank is about to write, once, before it leaves anything else there.

        Raises:
            OSError: it cannot be said.
        """

    def writer(self) -> FileSystemWriter:
        """Torch's writer, for the process that asks."""

    def leave(self, note: str, data: bytes) -> None:
        """Tell other ranks something, when what was written before is there to stay.

        Args:
            note: a name that no other rank takes.
            data: what to tell.

        Raises:
            OSError: it cannot be written.
        """

    def take(self, notes: Sequence[str]) -> list[bytes]:
        """What other ranks have left, in this order.

        Raises:
            FileNotFoundError: one is not there.
            OSError: they cannot be read.
        """

    def commit(self, made: Committed, files: Mapping[str, int]) -> None:
        """On rank 0, when every rank has written: make it a checkpoint, for good, without the notes.

        Args:
            made: what it is.
            files: of each file how many bytes have been written.

        Raises:
            OSError: a file is not there as it was written; or it cannot be committed.
            UncommittedError: another process has abandoned it.
        """


class Place(Protocol):
    """The checkpoints of one job."""

    def take_over(self, keep_last: int | None) -> None:
        """On rank 0, before the first save: remove what earlier lives have left.

        Args:
            keep_last: how many checkpoints to keep; None keeps all.

        Raises:
            OSError: they cannot be looked at.
            UncommittedError: there are checkpoints of another kind.
        """

    def draft(self, step: int, life: Life) -> Draft:
        """A save, by what makes it this one."""

    def committed(self, step: int) -> Path | str | None:
        """The checkpoint of a step, as far as this rank knows without waiting."""

    def latest(self) -> Committed | None:
        """The committed checkpoint of the highest step.

        Raises:
            OSError: it cannot be looked for.
            UncommittedError: it may be one of which only another version of Muster knows.
        """

    def read(self, path: Path | str) -> Committed:
        """What a checkpoint is.

        Raises:
            UncommittedError: it is none.
            OSError: it cannot be looked at.
        """

    def reader(self, made: Committed) -> StorageReader:
        """Torch's reader of a checkpoint."""

    def sweep(self, keep_last: int | None, decided: Life) -> None:
        """Remove what failed saves have left, and all but the last checkpoints.

        Args:
            keep_last: how many checkpoints to keep; None keeps all.
            decided: the last save that is decided: what is later may still be written by other ranks.

        Raises:
            OSError: the place cannot be looked at. The next sweep goes on.
        """
