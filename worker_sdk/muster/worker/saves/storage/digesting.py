"""Torch's file systems for writing checkpoints, which digest and sync what they write.

Torch's writer asks a stream for its position where an item begins and where it ends. A segment of the file
ends there, so the item can be verified by itself. No byte is read again.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import IOBase
from pathlib import PurePath
from typing import Any, ClassVar

from torch.distributed.checkpoint.filesystem import FileSystemBase

from muster.checkpoint.digest import Readable, Segment, SegmentDigester
from muster.worker.saves.storage.direct_file import DirectFileSystem


class DigestingStream:
    """A stream that digests what is written to it.

    Args:
        raw: where the bytes go.
        sync: whether to sync the file when this stream is closed. The raw stream stays open.
    """

    def __init__(self, raw: IOBase, *, sync: bool) -> None:
        self._raw: Any = raw
        self._sync = sync
        self._digester = SegmentDigester()
        self._closed = False

    def write(self, data: Readable) -> int:
        """Write all of the bytes, and add them to the digest."""
        view = memoryview(data).cast("B")
        self._digester.update(view)
        self._raw.write(view)
        return view.nbytes

    def tell(self) -> int:
        """Return the position, and end a segment here."""
        self._digester.cut()
        return self._digester.size

    def flush(self) -> None:
        """Do nothing. Torch flushes after each tensor; :meth:`fileno` and :meth:`close` flush once."""

    def fileno(self) -> int:
        """Flush, and return the file's descriptor, by which all that was written can be synced."""
        self._raw.flush()
        return int(self._raw.fileno())

    def close(self) -> None:
        """Flush, and sync the file at its final size."""
        if not self._closed:
            self._closed = True
            self._raw.flush()
            if self._sync:
                os.fsync(self._raw.fileno())

    def segments(self) -> tuple[Segment, ...]:
        """Return the digests of what was written."""
        return self._digester.segments()


class Digesting(FileSystemBase):
    """Makes one of torch's file systems digest what it writes.

    Attributes:
        written: by name, the segments of each file that was written.
    """

    sync: ClassVar[bool]
    """Whether this process must sync what it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, tuple[Segment, ...]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file, as torch does, and digest what is written to it."""
        stream = None
        with super().create_stream(path, mode) as raw:  # type: ignore[safe-super]
            if mode != "wb":
                yield raw
                return
            stream = DigestingStream(raw, sync=self.sync)
            yield stream
            stream.close()
        # An object store has the object only now.
        self.written[PurePath(path).name] = stream.segments()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file, as torch does, and its digests."""
        super().rename(path, new_path)  # type: ignore[safe-super]
        if (segments := self.written.pop(PurePath(path).name, None)) is not None:
            self.written[PurePath(new_path).name] = segments


class DigestingFiles(Digesting, DirectFileSystem):
    """Files on a mounted file system."""

    sync = True
