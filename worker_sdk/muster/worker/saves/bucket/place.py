"""A job's checkpoints in a bucket, for :class:`Checkpointer`."""

import logging
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.storage import StorageReader

from muster.worker.saves.bucket.fsspec_objects import FsspecObjects
from muster.worker.saves.bucket.protocol import Attempt, CheckpointBucket
from muster.worker.saves.committed import Committed, Life
from muster.worker.saves.written import check_sizes

logger = logging.getLogger(__name__)

NOTES = ".ranks"
"""In a save that is not committed: what ranks tell each other."""
ENTERED = ".entered-"
"""How the names begin of the objects that ranks make there first, once."""
METADATA = ".metadata"
"""Torch's, without which nothing can be loaded."""


class BucketPlace:
    """The checkpoints of one job below an address.

    Args:
        url: the address, with a scheme.
        options: what fsspec's implementation of the scheme takes.
        run_id: of the job.

    Raises:
        ValueError: it is no such address.
        ImportError: the scheme's package is not installed.
        OSError: nothing can be written or removed there.
    """

    def __init__(self, url: str, options: Mapping[str, Any], run_id: str) -> None:
        _check_options(options)
        self._objects = FsspecObjects(url, options)
        self._objects.check()
        self._run_id = run_id
        self._bucket = CheckpointBucket(self._objects, self._objects.url, run_id)

    def take_over(self, keep_last: int | None) -> None:
        """Remove what earlier lives of the job, and other jobs, have left."""
        self._bucket.check_kind()
        if not self._objects.check_exclusive():
            logger.warning(
                "%s has no exclusive writes: see to it that no two jobs, nor two lives of one, are there at "
                "the same time",
                self._objects.url,
            )
        self._bucket.sweep(keep_last)

    def draft(self, step: int, life: Life) -> "BucketDraft":
        """A save."""
        return BucketDraft(self._objects, self._bucket, self._bucket.attempt(step, life))

    def committed(self, step: int) -> str | None:
        """The checkpoint of a step, if this process has seen it."""
        attempt = self._bucket.committed(step)
        return None if attempt is None else self._bucket.path(attempt)

    def latest(self) -> Committed | None:
        """The committed checkpoint of the highest step."""
        return self._bucket.latest()

    def read(self, path: Path | str) -> Committed:
        """What a checkpoint is, here or below another address of the same store."""
        url, _, name = str(path).rstrip("/").rpartition("/")
        if "://" not in url:
            raise ValueError(
                f"{path} is in a folder, and this Checkpointer's checkpoints are in {self._objects.url}. "
                "Load it by a Checkpointer of its folder."
            )
        if url == self._objects.url:
            return self._bucket.read(name)
        objects = FsspecObjects(url, self._objects.options)
        return CheckpointBucket(objects, objects.url, self._run_id).read(name)

    def reader(self, made: Committed) -> StorageReader:
        """Torch's reader of a checkpoint."""
        # What was opened before may have credentials that were replaced since.
        return FsspecReader(str(made.path), skip_instance_cache=True, **self._objects.options)

    def sweep(self, keep_last: int | None, decided: Life) -> None:
        """Remove what failed saves have left, and all but the last checkpoints."""
        self._bucket.sweep(keep_last, decided)


class BucketDraft:
    """A save that is being written.

    Args:
        objects: where.
        bucket: what decides there.
        attempt: what it is called.
    """

    def __init__(self, objects: FsspecObjects, bucket: CheckpointBucket, attempt: Attempt) -> None:
        self._objects = objects
        self._bucket = bucket
        self._attempt = attempt
        self._entered = False
        """Whether this rank has; a child has it from its parent."""

    @property
    def checkpoint(self) -> str:
        """Where it is, committed or not."""
        return self._bucket.path(self._attempt)

    def begin(self) -> None:
        """Nothing: a folder is there when there is something in it."""

    def enter(self, rank: int) -> None:
        """Say that a rank is about to write."""
        if not self._entered:
            self._objects.put(f"{self._attempt.name}/{_entered(rank)}", b"")
            self._entered = True

    def writer(self) -> FileSystemWriter:
        """Torch's writer. It copies nothing ahead, for which torch would ask for a stream of the GPU."""
        return FsspecWriter(
            self.checkpoint, sync_files=False, per_thread_copy_ahead=0, **self._objects.options
        )

    def leave(self, note: str, data: bytes) -> None:
        """Tell other ranks something."""
        self._objects.put(self._note(note), data)

    def take(self, notes: Sequence[str]) -> list[bytes]:
        """What other ranks have left."""
        found = self._objects.get_all(map(self._note, notes))
        missing = [note for note in notes if self._note(note) not in found]
        if missing:
            raise FileNotFoundError(
                f"{self.checkpoint}/{NOTES}/{missing[0]}, which another rank has written, is not there: all "
                "ranks must save the same steps in the same order, in one bucket."
            )
        return [found[self._note(note)] for note in notes]

    def commit(self, made: Committed, files: Mapping[str, int]) -> None:
        """Make it a checkpoint."""
        name = self._attempt.name
        there = self._objects.sizes(name)
        check_sizes(self.checkpoint, there, {METADATA: 1, **files})
        notes = {found for found in there if found.startswith(f"{NOTES}/")}
        self._objects.remove(f"{name}/{note}" for note in notes)
        entered = {_entered(rank): 0 for rank in range(made.world_size)}
        held = {one: size for one, size in there.items() if one == METADATA or one in files}
        self._bucket.commit(self._attempt, made, held | entered)

    def _note(self, note: str) -> str:
        return f"{self._attempt.name}/{NOTES}/{note}"


def _check_options(options: Mapping[str, Any]) -> None:
    """Torch's writer hands on to fsspec what it does not know."""
    known = sorted(options.keys() & signature(FsspecWriter).parameters.keys())
    if known:
        raise ValueError(
            f"storage_options has {known[0]}, which torch's writer takes for itself. Name what fsspec's "
            "implementation of the scheme takes."
        )


def _entered(rank: int) -> str:
    return f"{ENTERED}{rank}"
