"""Files that are written past the page cache (``O_DIRECT``).

A checkpoint is as large as the state, so writing it through the page cache takes that much memory from
training, page by page. Direct writes take one buffer. They are used on local file systems: measured on ext4,
and XFS writes directly in the same way. Other file systems, such as NFS and Lustre, have their own ways to
write large files, and get ordinary writes.
"""

import errno
import fcntl
import functools
import io
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

DIRECT_FILE_SYSTEMS = frozenset({"ext4", "xfs"})
"""The file systems whose files are written directly."""
BUFFER_BYTES = 8 * 2**20
"""The size of one direct write."""
ALIGNMENT = 4096
"""Direct writes begin and end at multiples of a device's block size, which is at most this many bytes."""


class DirectFile(io.RawIOBase):
    """A new file. It is written directly, except for a last part that does not fill a block.

    A flush in the middle is allowed. The file is written ordinarily from there on.

    Args:
        path: the file's path; a file of this name is replaced.
        buffer_bytes: the size of its buffer, a multiple of :data:`ALIGNMENT`.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str], buffer_bytes: int = BUFFER_BYTES) -> None:
        super().__init__()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._direct = _set_direct(self._descriptor, True)
        self._buffer = memoryview(mmap.mmap(-1, buffer_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._used = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor. It does not flush."""
        return self._descriptor

    def write(self, data: Any, /) -> int:  # noqa: ANN401  (any buffer)
        """Write all of the bytes.

        Args:
            data: a contiguous buffer.

        Returns:
            Their number.

        Raises:
            OSError: the file cannot be written.
        """
        source = memoryview(data).cast("B")
        begin = 0
        while begin < source.nbytes:
            count = min(source.nbytes - begin, self._buffer.nbytes - self._used)
            self._buffer[self._used : self._used + count] = source[begin : begin + count]
            self._used += count
            begin += count
            if self._used == self._buffer.nbytes:
                self._write_out(self._used)
        return source.nbytes

    def flush(self) -> None:
        """Write out the buffer.

        Raises:
            OSError: the file cannot be written.
        """
        super().flush()  # Raises ValueError for a closed file.
        self._write_out(self._used - self._used % ALIGNMENT)
        if self._used:
            self._stop_direct()
            self._write_out(self._used)

    def close(self) -> None:
        """Flush and close the file.

        Raises:
            OSError: the file cannot be written; it is closed nevertheless.
        """
        if self.closed:
            return
        try:
            super().close()  # It flushes.
        finally:
            os.close(self._descriptor)

    def _write_out(self, count: int) -> None:
        """Write the first bytes of the buffer, and move the others to its beginning."""
        begin = 0
        while begin < count:
            try:
                written = os.write(self._descriptor, self._buffer[begin:count])
            except OSError as error:
                if not self._direct or error.errno != errno.EINVAL:
                    raise
                self._stop_direct()  # This device wants another alignment.
                continue
            begin += written
            if written % ALIGNMENT:
                self._stop_direct()  # The rest is not aligned.
        left = self._used - count
        self._buffer[:left] = self._buffer[count : self._used]
        self._used = left

    def _stop_direct(self) -> None:
        if self._direct:
            _set_direct(self._descriptor, False)
            self._direct = False


def _set_direct(descriptor: int, direct: bool) -> bool:
    """Turn direct writes on or off; return whether they are on."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return direct


class DirectFileSystem(FileSystem):
    """Torch's file system, which writes new files directly on :data:`DIRECT_FILE_SYSTEMS`."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file, as torch does."""
        if mode == "wb" and file_system_of(Path(path).parent.stat().st_dev) in DIRECT_FILE_SYSTEMS:
            with DirectFile(path) as stream:
                yield stream
        else:
            with super().create_stream(path, mode) as stream:
                yield stream


@functools.cache
def file_system_of(device: int) -> str | None:
    """Return the type of the file system on a device; None if it is unknown."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == number:
            return source.split()[0]
    return None
