"""The files of one checkpoint in a bucket."""

from collections.abc import Iterator
from contextlib import contextmanager

from muster.checkpoint.bucket.fsspec_objects import FsspecObjects
from muster.checkpoint.source import OpenFile


class BucketSource:
    """A checkpoint in a bucket.

    Args:
        objects: the objects of the job.
        name: the attempt's name, below which its objects are.
    """

    def __init__(self, objects: FsspecObjects, name: str) -> None:
        self._objects = objects
        self._name = name

    @property
    def place(self) -> str:
        """The checkpoint's address."""
        return f"{self._objects.url}/{self._name}"

    def sizes(self) -> dict[str, int]:
        """Return all objects of the checkpoint, and their sizes in bytes."""
        return self._objects.sizes(self._name)

    @contextmanager
    def open(self, name: str) -> Iterator[OpenFile]:
        """Open an object: each read is a request of its own."""
        yield _Object(self._objects, f"{self._name}/{name}")


class _Object:
    def __init__(self, objects: FsspecObjects, name: str) -> None:
        self._objects = objects
        self._name = name

    def read(self, offset: int, length: int) -> bytes:
        return self._objects.get_range(self._name, offset, length)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        data = self.read(offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)
