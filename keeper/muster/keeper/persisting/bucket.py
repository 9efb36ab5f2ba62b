"""Persists to a bucket, in the format of a ``Checkpointer`` of that bucket."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from fsspec.core import url_to_fs

from muster.checkpoint.bucket.fsspec_objects import FsspecObjects
from muster.checkpoint.bucket.protocol import CheckpointBucket
from muster.checkpoint.committed import Committed, UncommittedError
from muster.checkpoint.manifest import FileEntry
from muster.keeper.persisting.destination import Described

ENTERED = ".entered-"
"""How the names begin of the objects by which a sweep notices an attempt; there is one for each rank."""


class BucketDestination:
    """The place of one checkpoint in a bucket.

    Args:
        objects: the bucket.
        bucket: the checkpoints there.
        described: the checkpoint.
    """

    def __init__(self, objects: FsspecObjects, bucket: CheckpointBucket, described: Described) -> None:
        self._objects = objects
        self._bucket = bucket
        self._described = described
        checkpoint = described.checkpoint
        self._attempt = bucket.attempt(checkpoint.step, checkpoint.attempt)

    @property
    def path(self) -> str:
        """Where it is, committed or not."""
        return self._bucket.path(self._attempt)

    def is_committed(self) -> bool:
        """Return whether it is committed already."""
        try:
            return self._described.is_in(self._bucket.read(self._attempt.name))
        except UncommittedError:
            return False

    def enter(self, rank: int) -> None:
        """Make the object by which a sweep notices the attempt, before any other."""
        self._objects.put(f"{self._attempt.name}/{ENTERED}{rank}", b"")

    def sizes(self) -> Mapping[str, int]:
        """Return the objects that are there, and their sizes in bytes."""
        return self._objects.sizes(self._attempt.name)

    def has(self, name: str, entry: FileEntry) -> bool:
        """Return true: a store has an object only when all of it was sent, and only verified bytes are."""
        return True

    def write(self, name: str, pieces: Iterable[memoryview]) -> None:
        """Write an object."""
        fs, path = url_to_fs(f"{self.path}/{name}", **self._objects.options)
        try:
            stream = fs.open(path, "wb")
            try:
                for piece in pieces:
                    stream.write(bytes(piece))
            except BaseException:
                # To close it would make an object of what was sent.
                with suppress(Exception):
                    stream.discard()
                raise
            stream.close()
        except OSError:
            raise
        except ValueError as error:
            raise OSError(f"{self.path}/{name} cannot be written: {error}") from error

    def write_small(self, name: str, data: bytes) -> None:
        """Write a small object."""
        self._objects.put(f"{self._attempt.name}/{name}", data)

    def flush(self) -> None:
        """Do nothing: the store makes objects durable."""

    def settle(self) -> bool:
        """Make sure that the checkpoint is committed, or never will be; return whether it is."""
        return self._bucket.settle(self._attempt)

    def commit(self, made: Committed, files: Mapping[str, int]) -> None:
        """Create the verdict, and remove what need not be kept."""
        self._bucket.latest()  # The order of this commit comes after those of all others.
        held = {**files, **{f"{ENTERED}{rank}": 0 for rank in range(made.world_size)}}
        self._bucket.commit(self._attempt, replace(made, path=self.path), held)
        checkpoint = self._described.checkpoint
        self._bucket.sweep(checkpoint.keep_persisted or None, checkpoint.attempt)
