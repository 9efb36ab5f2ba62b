"""Where a checkpoint is persisted: what a folder and a bucket have in common."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from muster.checkpoint.committed import Committed
from muster.checkpoint.manifest import FileEntry
from muster.keeper.vocabulary import LocalCheckpoint

PREFIX = "save"
"""The group of the barrier that decides a ``Checkpointer``'s saves."""


class LostFilesError(FileNotFoundError):
    """Files were copied to shared storage, were removed there, and are not on this node.

    Args:
        names: the files.
        where: the place in shared storage.
    """

    def __init__(self, names: Sequence[str], where: str) -> None:
        super().__init__(f"{', '.join(names)} of {where} is not there any more")
        self.names = names


class Destination(Protocol):
    """The place of one checkpoint in shared storage. One thread uses it."""

    @property
    def path(self) -> str:
        """Where it is when it is committed."""

    def is_committed(self) -> bool:
        """Return whether it is committed already.

        Raises:
            FileExistsError: another checkpoint of the step is there, which must not be replaced.
            OSError: it cannot be looked at.
        """

    def enter(self, rank: int) -> None:
        """Say that the part of a rank is about to be written.

        Raises:
            OSError: it cannot be said.
        """

    def sizes(self) -> Mapping[str, int]:
        """Return the files that are there, and their sizes in bytes.

        Raises:
            OSError: they cannot be listed.
        """

    def has(self, name: str, entry: FileEntry) -> bool:
        """Return whether a file that has the right size is what is to be written.

        Raises:
            OSError: it cannot be read.
        """

    def write(self, name: str, pieces: Iterable[memoryview]) -> None:
        """Write a file, durably.

        Raises:
            OSError: it cannot be written.
        """

    def write_small(self, name: str, data: bytes) -> None:
        """Write a small file, durably.

        Raises:
            OSError: it cannot be written.
        """

    def flush(self) -> None:
        """Make the names of the written files durable."""

    def settle(self) -> bool:
        """Make sure that the checkpoint is committed, or never will be; return whether it is.

        Raises:
            OSError: it cannot be made sure of.
        """

    def commit(self, made: Committed, files: Mapping[str, int]) -> None:
        """Commit the checkpoint, and remove what need not be kept.

        Args:
            made: what it is.
            files: all of its files, and their sizes in bytes.

        Raises:
            OSError: it cannot be committed.
            UncommittedError: another process has abandoned it.
        """


@dataclass(frozen=True, slots=True)
class Described:
    """A checkpoint of a run, as its marker describes it.

    Args:
        checkpoint: what it is.
        run_id: the run.
    """

    checkpoint: LocalCheckpoint
    run_id: str

    def made(self, path: str) -> Committed:
        """Return what the marker says, but for the order of the commit."""
        one = self.checkpoint
        return Committed(
            one.step,
            one.world_size,
            self.run_id,
            PREFIX,
            one.attempt.number,
            path,
            committed_at=time.time(),
            manifest=one.manifest,
        )

    def is_in(self, made: Committed | None) -> bool:
        """Return whether a committed checkpoint is this one."""
        one = self.checkpoint
        return made is not None and (made.run_id, made.step, made.manifest) == (
            self.run_id,
            one.step,
            one.manifest,
        )
