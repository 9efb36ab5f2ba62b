"""Where the files of one checkpoint are read from: a folder, or the objects below an address."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from muster.checkpoint.retry import is_file, is_link, resolved

PIECE = 2**20
"""Bytes of a small file that one call reads."""


class OpenFile(Protocol):
    """A file that is open for reading."""

    def read(self, offset: int, length: int) -> bytes:
        """Return up to ``length`` bytes from an offset on; fewer only at the file's end.

        Raises:
            OSError: they cannot be read.
        """

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from an offset on.

        Returns:
            How many bytes it got: fewer than its length only at the file's end.

        Raises:
            OSError: they cannot be read.
        """


class Source(Protocol):
    """The files of one checkpoint. It may be used by several threads."""

    @property
    def place(self) -> str:
        """The checkpoint's path, for people."""

    def sizes(self) -> dict[str, int]:
        """Return all files by their path in the checkpoint, and their sizes in bytes.

        Raises:
            OSError: they cannot be listed.
        """

    def open(self, name: str) -> AbstractContextManager[OpenFile]:
        """Open a file.

        Raises:
            FileNotFoundError: it is certainly not there.
            OSError: it cannot be opened.
        """


class FolderSource:
    """A checkpoint in a folder.

    Args:
        path: the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def place(self) -> str:
        """The checkpoint's path."""
        return str(self._path)

    def sizes(self) -> dict[str, int]:
        """Return all files below the folder, and their sizes in bytes."""
        found: dict[str, int] = {}

        def fail(error: OSError) -> None:
            raise error

        for folder, _, names in os.walk(self._path, onerror=fail):
            for name in names:
                path = Path(folder, name)
                with suppress(FileNotFoundError):  # It was just removed, or is a broken link.
                    found[str(path.relative_to(self._path))] = path.stat().st_size
        return found

    @contextmanager
    def open(self, name: str) -> Iterator[OpenFile]:
        """Open a file."""
        handle = os.open(self._path / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield _Handle(handle)
        finally:
            os.close(handle)


BESIDE = ".committed"
"""How the name ends of the folder beside a checkpoint that is one file, with what other checkpoints hold."""


def beside(path: Path) -> Path:
    """Return the name of the folder beside a checkpoint that is one file."""
    return path.with_name(f".{path.name}{BESIDE}")


def home(path: Path) -> Path:
    """Return the folder that holds a checkpoint's marker, manifest and marks.

    Args:
        path: the checkpoint: a folder, a file, or a link to one.

    Returns:
        The checkpoint itself; for a file the folder beside it, which may be missing.
    """
    return beside(_target(path)) if is_file(path) else path


def _target(path: Path) -> Path:
    return resolved(path) if is_link(path) else path


class FileSource:
    """A checkpoint that is one file, with its manifest in the folder beside it.

    Args:
        path: the checkpoint, or a link to it.
    """

    def __init__(self, path: Path) -> None:
        self._file = _target(path)
        self._beside = FolderSource(beside(self._file))

    @property
    def place(self) -> str:
        """The checkpoint's path."""
        return str(self._file)

    def sizes(self) -> dict[str, int]:
        """Return the file and those beside it, and their sizes in bytes."""
        return {**self._beside.sizes(), self._file.name: self._file.stat().st_size}

    def open(self, name: str) -> AbstractContextManager[OpenFile]:
        """Open the file, or one beside it."""
        return (
            FolderSource(self._file.parent).open(name) if name == self._file.name else self._beside.open(name)
        )


def source_of(path: Path) -> FolderSource | FileSource:
    """Return what a checkpoint that is a folder or a file is read from."""
    return FileSource(path) if is_file(path) else FolderSource(path)


class _Handle:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    def read(self, offset: int, length: int) -> bytes:
        buffer = bytearray(length)
        return bytes(memoryview(buffer)[: self.read_into(offset, memoryview(buffer))])

    def read_into(self, offset: int, buffer: memoryview) -> int:
        done = 0
        # One call reads at most 2 GiB, and a network file system may give less.
        while done < len(buffer) and (count := os.preadv(self._handle, [buffer[done:]], offset + done)):
            done += count
        return done


def read_whole(source: Source, name: str) -> bytes:
    """Return a small file's content.

    Raises:
        FileNotFoundError: it is certainly not there.
        OSError: it cannot be read.
    """
    with source.open(name) as file:
        parts: list[bytes] = []
        offset = 0
        while data := file.read(offset, PIECE):
            parts.append(data)
            offset += len(data)
        return b"".join(parts)
