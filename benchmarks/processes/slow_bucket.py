"""Shared storage of a limited speed, for all processes together: ``slowbucket:///folder``.

Objects are files. Every byte that is read or written waits for its turn in a file that all processes lock.
"""

# ruff: noqa: ANN401 – fsspec is not typed
import fcntl
import struct
import time
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

SCHEME = "slowbucket"
RATE = 100_000_000
"""Bytes a second."""
TURN = 2**20
"""Most bytes of one turn: a process that is killed leaves no more of them to wait for."""
TURNS = Path("/tmp/muster-slow-bucket")
"""When the storage is free again, on the monotonic clock; and how many bytes were read and written."""


def pay(count: int, *, reads: bool) -> None:
    """Wait until so many bytes could be transferred."""
    for done in range(0, count, TURN):
        _take_turn(min(TURN, count - done), reads=reads)


def _take_turn(count: int, *, reads: bool) -> None:
    with TURNS.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        free_at, read, written = struct.unpack("dqq", file.read(24))
        free_at = max(free_at, time.monotonic()) + count / RATE
        file.seek(0)
        file.write(struct.pack("dqq", free_at, read + count * reads, written + count * (not reads)))
    time.sleep(max(0.0, free_at - time.monotonic()))


def reset() -> None:
    """Begin to count."""
    TURNS.write_bytes(struct.pack("dqq", 0.0, 0, 0))


def transferred() -> tuple[int, int]:
    """Return how many bytes were read and written."""
    _, read, written = struct.unpack("dqq", TURNS.read_bytes())
    return read, written


class _SlowFile:
    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, *arguments: int) -> bytes:
        data: bytes = self._file.read(*arguments)
        pay(len(data), reads=True)
        return data

    def readinto(self, buffer: Any) -> int:
        count: int = self._file.readinto(buffer)
        pay(count, reads=True)
        return count

    def write(self, data: Any) -> int:
        pay(memoryview(data).nbytes, reads=False)
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "_SlowFile":
        self._file.__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._file.__exit__(*failure)


class SlowBucket(LocalFileSystem):  # type: ignore[misc]
    """Objects are files, and folders are made with the first object in them."""

    protocol = (SCHEME,)

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"auto_mkdir": True, **options})

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(str(path).removeprefix(f"{SCHEME}://")))

    def unstrip_protocol(self, name: str) -> str:
        """Return the address of a path."""
        return f"{SCHEME}://{self._strip_protocol(name)}"

    def _open(self, *arguments: Any, **options: Any) -> Any:
        return _SlowFile(super()._open(*arguments, **options))


fsspec.register_implementation(SCHEME, SlowBucket, clobber=True)
