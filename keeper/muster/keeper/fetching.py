"""Fetches one file from other keepers, verifies it segment by segment, and resumes an interrupted fetch.

A file is cut into pieces of whole segments. Several threads fetch pieces at the same time, and write them to
their places in a partial file. If a connection breaks, the piece continues after its last verified segment,
perhaps from another keeper. After a restart, the segments that the partial file already has are verified, not
fetched again.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import xxhash

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.digest import Segment
from muster.checkpoint.local_folder import attempt_name
from muster.checkpoint.manifest import FileEntry
from muster.keeper.transport import AbsentError, Transport, TransportError

logger = logging.getLogger(__name__)

PIECE = 64 * 2**20
"""Smallest size of a piece in bytes; the last one may be smaller."""
BUFFER = 2**20
"""Largest number of bytes that one call receives."""
MAX_FAILURES = 2
"""Failures in a row without progress after which a source is not asked for the file again."""
VERIFY_AGAIN = "?verify=1"
"""The query that asks a keeper to verify its file again before it sends it."""


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
    """The file offset of the first missing segment."""
    segments: list[Segment]
    """The missing segments, in order."""

    @property
    def length(self) -> int:
        """The missing bytes."""
        return sum(segment.length for segment in self.segments)

    def advance(self) -> None:
        """Remove the first segment, which is there now."""
        self.offset += self.segments.pop(0).length


def pieces_of(entry: FileEntry, least: int = PIECE) -> list[Piece]:
    """Cut a file into pieces of at least so many bytes, but for the last."""
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
    """The keepers that may have a file, and the errors of each. Several threads share it.

    Args:
        urls: of the keepers, in the order in which they are asked.
        path: of the file in these URLs.
        name: the file, for people.
        absent: by URL, why the keeper does not have the file.
        damaged: by URL, why its copy counts as damaged.
        silent: by URL, why it counts as unreachable.
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
        """Return the error that says why no source can send the file."""
        said = "; ".join([*self.silent.values(), *self.damaged.values(), *self.absent.values()])
        if self.silent:
            return SilentSourcesError(f"{self.name} cannot be fetched now: {said}")
        if self.damaged:
            return DamagedSourcesError(f"all copies of {self.name} are damaged: {said}")
        return NoSourceError(f"no keeper has {self.name}: {said or 'none is known'}")

    def failed(self, url: str, error: TransportError) -> None:
        """Record that a keeper did not answer, or that its connection broke."""
        self._failures[url] += 1
        if self._failures[url] >= MAX_FAILURES:
            self.silent[url] = str(error)

    def progressed(self, url: str) -> None:
        """Record that a keeper sent a segment with the right digest."""
        self._failures[url] = 0

    def suspect(self, url: str, path: str, offset: int) -> None:
        """Record that a keeper sent wrong bytes.

        It is asked to verify its copy from now on. If it was asked so already, its copy counts as damaged.

        Args:
            url: the keeper's.
            path: the path that it was asked for.
            offset: of the wrong segment.
        """
        logger.error(
            "%s sent a damaged copy of %s (the segment at offset %d is not what was written)",
            url,
            self.name,
            offset,
        )
        if path.endswith(VERIFY_AGAIN):
            self.damaged[url] = f"{url} sent other bytes than were written, at offset {offset}"
        self._suspected.add(url)


@dataclass(frozen=True, slots=True)
class Fetch:
    """The fetch of one file.

    Args:
        transport: fetches bytes from other keepers.
        sources: the keepers that may have the file.
        entry: the file's size and digests.
        partial: the path to which the bytes are written.
    """

    transport: Transport
    sources: Sources
    entry: FileEntry
    partial: Path

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
        """Fetch a piece, in the calling thread.

        Raises:
            FetchError: no source can send it with the right digests.
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
                    self.sources.suspect(url, path, piece.offset)
                    return
                piece.advance()
                self.sources.progressed(url)
        finally:
            stream.close()

    def finish(self, path: Path) -> None:
        """Rename a complete file. It can be read then, and is not on the disk before the caller syncs it.

        Args:
            path: the file's final path.

        Raises:
            OSError: it cannot be written.
        """
        os.truncate(self.partial, self.entry.size)
        self.partial.rename(path)


def _is_there(handle: int, piece: Piece, size: int, buffer: memoryview) -> bool:
    """Advance a piece past the segments that the file has. Return whether the file has all of them."""
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


def shuffled(urls: Iterable[str], key: str) -> list[str]:
    """Return URLs in an order that depends on a key, so that different askers spread their load.

    Args:
        urls: the URLs; duplicates are removed.
        key: names the keeper that asks, and the file.
    """
    return sorted(set(urls), key=lambda url: xxhash.xxh3_64_intdigest(f"{key} {url}".encode()))
