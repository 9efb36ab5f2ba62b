"""Persists to a folder that all nodes share, in the format of a ``Checkpointer`` of that folder."""

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

from muster.checkpoint.committed import Committed, UncommittedError
from muster.checkpoint.directory import CheckpointDirectory, sync
from muster.checkpoint.manifest import FileEntry, Manifest
from muster.checkpoint.retry import is_folder
from muster.checkpoint.source import FolderSource
from muster.checkpoint.verification import verify
from muster.keeper.persisting.destination import Described


class FolderDestination:
    """The place of one checkpoint in a shared folder.

    Args:
        directory: the checkpoints there.
        described: the checkpoint.
    """

    def __init__(self, directory: CheckpointDirectory, described: Described) -> None:
        self._directory = directory
        self._described = described
        checkpoint = described.checkpoint
        self._checkpoint = directory.path(checkpoint.step)
        self._unfinished = directory.unfinished(checkpoint.step, checkpoint.attempt)

    @property
    def path(self) -> str:
        """Where it is when it is committed."""
        return str(self._checkpoint)

    def is_committed(self) -> bool:
        """Return whether it is committed already."""
        entry = self._directory.entry(self._checkpoint)
        if entry is None or entry.replaceable:
            return False
        if self._described.is_in(entry.made):
            return True
        raise FileExistsError(
            f"{self._checkpoint} is another checkpoint of this step. Remove it, or persist to another folder."
        )

    def enter(self, rank: int) -> None:
        """Make the folder of the unfinished checkpoint."""
        self._unfinished.mkdir(parents=True, exist_ok=True)

    def sizes(self) -> Mapping[str, int]:
        """Return the files that are there, and their sizes in bytes."""
        return FolderSource(self._unfinished).sizes() if is_folder(self._unfinished) else {}

    def has(self, name: str, entry: FileEntry) -> bool:
        """Return whether a file is what is to be written: a crash may have left its size alone."""
        found = verify(FolderSource(self._unfinished), Manifest({name: entry}), threads=1)
        return not any(one.damages for one in found)

    def write(self, name: str, pieces: Iterable[memoryview]) -> None:
        """Write a file, and sync it. Until it is whole, it has another name.

        A keeper that has lost its turn may still write a file that another one has finished.
        """
        draft = self._unfinished / f".{name}.{uuid4().hex}"
        try:
            with draft.open("xb", buffering=0) as file:
                for piece in pieces:
                    done = 0
                    while done < len(piece):
                        done += file.write(piece[done:])
                os.fsync(file.fileno())
            draft.rename(self._unfinished / name)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def write_small(self, name: str, data: bytes) -> None:
        """Write a small file, and sync it."""
        self.write(name, [memoryview(data)])
        self.flush()

    def flush(self) -> None:
        """Sync the names of the files."""
        sync(self._unfinished)

    def settle(self) -> bool:
        """Make sure that the checkpoint is committed, or never will be; return whether it is."""
        checkpoint = self._described.checkpoint
        return self._directory.settle(checkpoint.step, checkpoint.attempt, checkpoint.manifest)

    def commit(self, made: Committed, files: Mapping[str, int]) -> None:
        """Give the checkpoint its name, and remove what need not be kept."""
        there = self.sizes()
        lost = sorted(name for name, size in files.items() if there.get(name) != size)
        if lost:
            # It was given up meanwhile, and another keeper has begun to copy its part once more.
            raise UncommittedError(f"{self._unfinished} lacks {lost[0]}, which was there")
        for name in there:
            if name not in files:
                self._remove(name)
        self._directory.commit(self._unfinished, replace(made, path=self._checkpoint))
        checkpoint = self._described.checkpoint
        self._directory.sweep(checkpoint.keep_persisted or None, checkpoint.attempt)

    def _remove(self, name: str) -> None:
        """Remove what does not belong to the checkpoint."""
        first = self._unfinished / Path(name).parts[0]
        if first.is_dir():
            shutil.rmtree(first, ignore_errors=True)
        else:
            first.unlink(missing_ok=True)
