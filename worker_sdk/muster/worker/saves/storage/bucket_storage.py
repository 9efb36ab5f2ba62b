"""A job's checkpoints in a bucket, for :class:`Checkpointer`."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or find_spec("torch.distributed.checkpoint.fsspec_filesystem") is None:
    from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as FsspecFileSystem
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
else:  # torch 2.15 and newer
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecWriter
    from torch.distributed.checkpoint.fsspec_filesystem import _FileSystem as FsspecFileSystem

from muster.checkpoint.bucket.attempts import Attempt
from muster.checkpoint.bucket.fsspec_objects import FsspecObjects
from muster.checkpoint.bucket.protocol import CheckpointBucket, DamagedError
from muster.checkpoint.bucket.source import BucketSource
from muster.checkpoint.committed import Committed, SaveAttempt
from muster.checkpoint.containment import check_name
from muster.checkpoint.damage import Damage, DamageError
from muster.checkpoint.digest import Segment
from muster.checkpoint.manifest import MANIFEST, Manifest, ManifestReference
from muster.worker.saves.storage.checkpoint_storage import Newest
from muster.worker.saves.storage.digesting import Digesting
from muster.worker.saves.storage.written import check_sizes

logger = logging.getLogger(__name__)

NOTES = ".ranks"
"""In a save that is not committed: what ranks tell each other."""
ENTERED = ".entered-"
"""How the names begin of the objects that ranks make there first, once."""


class BucketStorage:
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

    def take_over(self) -> None:
        """Remove what earlier lives of the job, and other jobs, have left, and did not commit."""
        self._bucket.check_kind()
        if not self._objects.check_exclusive():
            logger.warning(
                "%s has no exclusive writes: see to it that no two jobs, nor two lives of one, are there at "
                "the same time",
                self._objects.url,
            )
        self._bucket.sweep(None)

    def pending(self, step: int, attempt: SaveAttempt) -> "PendingBucket":
        """Return a save."""
        return PendingBucket(self._objects, self._bucket, self._bucket.attempt(step, attempt))

    def committed(self, step: int) -> str | None:
        """Return the whole checkpoint of a step, if this process has seen it."""
        attempt = self._bucket.committed(step)
        return None if attempt is None else self._bucket.path(attempt)

    def newest(self, excluded: Collection[str]) -> Newest:
        """Return the whole checkpoint that was committed last, and what is damaged."""
        newest = self._bucket.latest(excluded)
        if newest is not None:
            return Newest(newest)
        entries = self._bucket.entries()
        return Newest(None, tuple(f"{self._bucket.path(one.attempt)}: {one.damage}" for one in entries))

    def read(self, path: Path | str) -> Committed:
        """Return what a checkpoint is, here or below another address of the same store."""
        bucket, name = self._bucket_of(path)
        try:
            return bucket.read(name)
        except DamagedError as error:
            raise DamageError(error.damage) from error

    def _bucket_of(self, path: Path | str) -> tuple[CheckpointBucket, str]:
        url, _, name = str(path).rstrip("/").rpartition("/")
        if "://" not in url:
            raise ValueError(
                f"{path} is in a folder, and this Checkpointer's checkpoints are in {self._objects.url}. "
                "Load it by a Checkpointer of its folder."
            )
        if url == self._objects.url:
            return self._bucket, name
        objects = FsspecObjects(url, self._objects.options)
        return CheckpointBucket(objects, objects.url, self._run_id), name

    def resolve_name(self, name: str, beside: Path | str | None = None) -> str:
        """Return where the checkpoint is that rank 0 named."""
        check_name(name)
        url = self._objects.url if beside is None else str(beside).rstrip("/").rpartition("/")[0]
        return f"{url}/{name}"

    def source(self, made: Committed) -> BucketSource:
        """Return what a checkpoint's objects are read from."""
        url, _, name = str(made.path).rpartition("/")
        objects = self._objects if url == self._objects.url else FsspecObjects(url, self._objects.options)
        return BucketSource(objects, name)

    def mark_damaged(self, made: Committed, damage: Damage) -> None:
        """Record durably that a checkpoint is damaged."""
        bucket, name = self._bucket_of(made.path)
        attempt = Attempt.parse(name)
        assert attempt is not None
        bucket.mark_damaged(attempt, damage)

    def settle(self, step: int, attempt: SaveAttempt, manifest: ManifestReference) -> bool:
        """Make sure that an attempt is committed, or never will be; return whether it is."""
        return self._bucket.settle(self._bucket.attempt(step, attempt))

    def sweep(
        self,
        keep_last: int | None,
        decided: SaveAttempt,
        used: Collection[Path | str],
        excluded: Collection[str] = (),
    ) -> None:
        """Remove what failed saves have left, and all but the checkpoints committed last."""
        self._bucket.sweep(keep_last, decided, used, excluded)


class DigestingObjects(Digesting, FsspecFileSystem):
    """Objects in a store that fsspec reaches. The store itself makes them durable, so nothing is synced."""

    sync = False


class ObjectWriter(FsspecWriter):
    """Torch's writer of a pending checkpoint.

    It copies nothing ahead: for that torch would use a stream of the GPU.

    Args:
        url: where it writes.
        options: what fsspec's implementation of the scheme takes.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        super().__init__(url, sync_files=False, per_thread_copy_ahead=0, **options)
        self._written = DigestingObjects()
        self.fs = self._written  # type: ignore[assignment]  # FsspecWriter does the same
        self.path = self._written.init_path(url, **options)

    @property
    def written(self) -> Mapping[str, tuple[Segment, ...]]:
        """By name, the segments of each object that this writer has written."""
        return self._written.written


class PendingBucket:
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

    def check_room(self, size: int) -> None:
        """Do nothing: a bucket has room."""

    def enter(self, rank: int) -> None:
        """Say that a rank is about to write."""
        if not self._entered:
            self._objects.put(f"{self._attempt.name}/{_entered(rank)}", b"")
            self._entered = True

    def writer(self) -> ObjectWriter:
        """Return torch's writer."""
        return ObjectWriter(self.checkpoint, self._objects.options)

    def copy(self, name: str, path: Path) -> None:
        """Write a file that this rank has written elsewhere."""
        self._objects.put_file(f"{self._attempt.name}/{name}", path)

    def leave(self, note: str, data: bytes) -> None:
        """Tell other ranks something."""
        self._objects.put(self._note(note), data)

    def take(self, notes: Sequence[str]) -> list[bytes]:
        """Return what other ranks have left."""
        found = self._objects.get_all(map(self._note, notes))
        missing = [note for note in notes if self._note(note) not in found]
        if missing:
            raise FileNotFoundError(
                f"{self.checkpoint}/{NOTES}/{missing[0]}, which another rank has written, is not there: all "
                "ranks must save the same steps in the same order, in one bucket."
            )
        return [found[self._note(note)] for note in notes]

    def commit(self, made: Committed, manifest: Manifest) -> None:
        """Make it a checkpoint."""
        name = self._attempt.name
        there = self._objects.sizes(name)
        files = {one: entry.size for one, entry in manifest.files.items()}
        check_sizes(self.checkpoint, there, files)
        self._objects.remove(f"{name}/{note}" for note in there if note.startswith(f"{NOTES}/"))
        data = manifest.encode()
        self._objects.put(f"{name}/{MANIFEST}", data)
        held = files | {MANIFEST: len(data)} | {_entered(rank): 0 for rank in range(made.world_size)}
        self._bucket.commit(self._attempt, replace(made, manifest=ManifestReference.of(data)), held)

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
