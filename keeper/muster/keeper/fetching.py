"""Fetches one file from other keepers, verified segment by segment, and goes on where it was interrupted.

A file is cut into pieces of whole segments. Several threads fetch pieces at the same time, and write them to
their places in a partial file. A piece that breaks off goes on after its last verified segment, perhaps from
another keeper. After a restart, the pieces that are in the partial file already are verified, not fetched.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import xxhash

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.digest import Segment
from muster.checkpoint.manifest import FileEntry
from muster.keeper.transport import AbsentError, Transport, TransportError
from muster.keeper.vocabulary import attempt_name

logger = logging.getLogger(__name__)

PIECE = 64 * 2**20
"""Bytes that a piece has at least, but for the last."""
BUFFER = 2**20
"""Bytes that one call receives at most."""
MAX_FAILURES = 2
"""Failures of a source without progress, after which a file is not asked of it again."""
VERIFY_AGAIN = "?verify=1"
"""Asks a keeper to verify its file again before it serves it."""


class FetchError(OSError):
    """A file could not be fetched. The message says what each source said."""


class NoSourceError(FetchError):
    """No source has the file."""


class SilentSourcesError(FetchError):
    """A source that may have the file did not answer."""


class DamagedSourcesError(FetchError):
    """The sources have the file, and all copies are damaged."""


@dataclass(slots=True)
class Piece:
    """A run of whole segments of a file."""

    offset: int
    """Where its first byte is that is not there yet."""
    segments: list[Segment]
    """Those that are not there yet, in order."""

    @property
    def length(self) -> int:
        """The bytes that are not there yet."""
        return sum(segment.length for segment in self.segments)

    def advance(self) -> None:
        """Note that the first segment is there."""
        self.offset += self.segments.pop(0).length


def pieces_of(entry: FileEntry, least: int = PIECE) -> list[Piece]:
    """Cut a file into pieces."""
    pieces: list[Piece] = []
    offset = 0
    piece = Piece(0, [])
    for segment in entry.segments:
        piece.segments.append(segment)
        offset += segment.length
        if piece.length >= least:
            pieces.append(piece)
            piece = Piece(offset, [])
    return [*pieces, piece] if piece.segments else pieces


def file_path(attempt: SaveAttempt, name: str) -> str:
    """Return the path by which a keeper serves a file."""
    return f"/files/{attempt_name(attempt)}/{quote(name, safe='')}"


@dataclass(slots=True)
class Sources:
    """The keepers that may have a file, and what is known of them. Several threads share it.

    Args:
        urls: of the keepers, in the order in which to ask them.
        path: by which they serve the file.
        name: the file, for people.
    """

    urls: Sequence[str]
    path: str
    name: str
    absent: dict[str, str] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    _suspected: set[str] = field(default_factory=set)
    _failures: Counter[str] = field(default_factory=Counter)

    def next(self) -> tuple[str, str]:
        """Return the URL of a keeper, and the path to ask it for.

        Raises:
            FetchError: no keeper is left.
        """
        for url in self.urls:
            if url not in self.absent and url not in self.damaged and url not in self.silent:
                return url, self.path + (VERIFY_AGAIN if url in self._suspected else "")
        raise self.error()

    def error(self) -> FetchError:
        """Return why the file cannot be fetched."""
        said = "; ".join([*self.silent.values(), *self.damaged.values(), *self.absent.values()])
        if self.silent:
            return SilentSourcesError(f"{self.name} cannot be fetched now: {said}")
        if self.damaged:
            return DamagedSourcesError(f"all copies of {self.name} are damaged: {said}")
        return NoSourceError(f"no keeper has {self.name}: {said or 'none is known'}")

    def failed(self, url: str, error: TransportError) -> None:
        """Note that a keeper did not answer, or broke off."""
        self._failures[url] += 1
        if self._failures[url] >= MAX_FAILURES:
            self.silent[url] = str(error)

    def progressed(self, url: str) -> None:
        """Note that a keeper sent a segment as it was written."""
        self._failures[url] = 0

    def suspect(self, url: str, offset: int) -> None:
        """Note that a keeper sent bytes that were not written. At first, it is asked to verify its copy."""
        logger.error(
            "%s sent a damaged copy of %s (the segment at offset %d is not what was written)",
            url,
            self.name,
            offset,
        )
        if url in self._suspected:
            self.damaged[url] = f"{url} sent other bytes than were written, at offset {offset}"
        self._suspected.add(url)


@dataclass(frozen=True, slots=True)
class Fetch:
    """The fetch of one file.

    Args:
        transport: how bytes come.
        sources: from where.
        entry: the file's size and digests.
        partial: where the bytes go.
        on_received: called with the number of bytes of each segment that came.
    """

    transport: Transport
    sources: Sources
    entry: FileEntry
    partial: Path
    on_received: Callable[[int], None] = lambda _: None

    def missing(self) -> list[Piece]:
        """Return the pieces that the partial file does not have.

        Raises:
            OSError: it cannot be read or made.
        """
        handle = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(handle).st_size
            if size > self.entry.size:
                os.ftruncate(handle, 0)
                size = 0
            buffer = memoryview(bytearray(BUFFER))
            return [piece for piece in pieces_of(self.entry) if not _is_there(handle, piece, size, buffer)]
        finally:
            os.close(handle)

    def get(self, piece: Piece) -> None:
        """Fetch a piece; a thread calls it.

        Raises:
            FetchError: no source has it, as it was written.
            OSError: it cannot be written.
        """
        handle = os.open(self.partial, os.O_WRONLY | os.O_CLOEXEC)
        try:
            buffer = memoryview(bytearray(min(BUFFER, piece.length)))
            while piece.segments:
                url, path = self.sources.next()
                try:
                    self._get_from(url, path, handle, piece, buffer)
                except AbsentError as error:
                    self.sources.absent[url] = str(error)
                except TransportError as error:
                    self.sources.failed(url, error)
        finally:
            os.close(handle)

    def _get_from(self, url: str, path: str, handle: int, piece: Piece, buffer: memoryview) -> None:
        stream = self.transport.open(url, path, piece.offset, piece.length)
        try:
            while piece.segments:
                segment = piece.segments[0]
                digest = xxhash.xxh3_128()
                done = 0
                while done < segment.length:
                    count = stream.read_into(buffer[: segment.length - done])
                    if not count:
                        raise TransportError(f"{url} broke off after {piece.offset + done} bytes")
                    digest.update(buffer[:count])
                    _write(handle, buffer[:count], piece.offset + done)
                    done += count
                if digest.digest() != segment.digest:
                    self.sources.suspect(url, piece.offset)
                    return
                piece.advance()
                self.sources.progressed(url)
                self.on_received(segment.length)
        finally:
            stream.close()

    def finish(self, path: Path) -> None:
        """Give a complete file its name, on the disk. The caller must sync the folder.

        Raises:
            OSError: it cannot be written.
        """
        handle = os.open(self.partial, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.ftruncate(handle, self.entry.size)
            os.fsync(handle)
        finally:
            os.close(handle)
        self.partial.rename(path)


def _is_there(handle: int, piece: Piece, size: int, buffer: memoryview) -> bool:
    """Skip the segments of a piece that the file has; return whether it has all of them."""
    while piece.segments:
        segment = piece.segments[0]
        if piece.offset + segment.length > size:
            return False
        if _digest(handle, piece.offset, segment.length, buffer) != segment.digest:
            return False
        piece.advance()
    return True


def _digest(handle: int, offset: int, length: int, buffer: memoryview) -> bytes:
    digest = xxhash.xxh3_128()
    done = 0
    while done < length and (count := os.preadv(handle, [buffer[: length - done]], offset + done)):
        digest.update(buffer[:count])
        done += count
    return digest.digest()


def _write(handle: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(handle, data[done:], offset + done)


def in_order(urls: Iterable[str], key: str) -> list[str]:
    """Return URLs in an order that differs from keeper to keeper and file to file, to spread the load."""
    return sorted(set(urls), key=lambda url: xxhash.xxh3_64_intdigest(f"{key} {url}".encode()))
