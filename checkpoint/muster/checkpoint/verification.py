"""Verifies that a checkpoint is byte for byte what was committed.

A mismatch counts as damage only if a second read, of a file opened again, finds it too.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import TypeVar

import xxhash

from muster.checkpoint.committed import MARKER
from muster.checkpoint.damage import Damage, DamageError
from muster.checkpoint.digest import Segment, digest_of
from muster.checkpoint.manifest import MANIFEST, FileEntry, Manifest, ManifestError, ManifestReference
from muster.checkpoint.retry import ABSENT_FILE, retrying
from muster.checkpoint.source import OpenFile, Source, read_whole

T = TypeVar("T")

PIECE = 8 * 2**20
"""Bytes that one call reads where the whole segment need not be in memory."""


def read_manifest(source: Source, reference: ManifestReference | None) -> Manifest | None:
    """Read and verify a checkpoint's manifest.

    Args:
        source: the checkpoint.
        reference: the marker's reference to it; None if the marker has none.

    Returns:
        The manifest; None if the checkpoint has none: 0.1.0 wrote no digests.

    Raises:
        DamageError: the manifest is not the one that was committed.
        OSError: it cannot be read.
    """
    if reference is None:
        return None

    def read() -> Manifest:
        data = present(MANIFEST, lambda: read_whole(source, MANIFEST))
        if not reference.matches(data):
            raise DamageError(Damage.found(MANIFEST, f"it is not the manifest that {MARKER} names"))
        try:
            return Manifest.decode(data)
        except ManifestError as error:
            raise DamageError(Damage.found(MANIFEST, str(error))) from error

    return confirmed(source.place, read)


def read_file(source: Source, manifest: Manifest, name: str) -> bytes:
    """Read a whole file of a checkpoint, verified.

    Raises:
        DamageError: it is not what was committed.
        OSError: it cannot be read.
    """
    entry = manifest.files.get(name)
    if entry is None:
        raise DamageError(Damage.found(MANIFEST, f"it does not name {name}"))

    def read() -> bytes:
        data = present(name, lambda: read_whole(source, name))
        if len(data) != entry.size:
            raise DamageError(Damage.found(name, _sizes(len(data), entry.size)))
        offset = 0
        for segment in entry.segments:
            check(name, offset, segment, memoryview(data)[offset : offset + segment.length])
            offset += segment.length
        return data

    return confirmed(source.place, read)


def read_item(
    file: OpenFile, name: str, offset: int, segments: Iterable[Segment], buffer: memoryview
) -> None:
    """Read an item of an open file, verified.

    Args:
        file: the file.
        name: its path in the checkpoint.
        offset: where the item begins, in bytes.
        segments: the item's.
        buffer: receives the item; it has the item's length.

    Raises:
        DamageError: it is not what was committed.
        OSError: it cannot be read.
    """
    there = buffer[: file.read_into(offset, buffer)]
    begin = 0
    for segment in segments:
        check(name, offset + begin, segment, there[begin : begin + segment.length])
        begin += segment.length


def read_piece(file: OpenFile, name: str, offset: int, buffer: memoryview) -> None:
    """Fill a buffer from an open file. Whether the bytes are right is not verified.

    Args:
        file: the file.
        name: its path in the checkpoint.
        offset: of the first byte.
        buffer: receives the bytes.

    Raises:
        DamageError: the file ends before.
        OSError: it cannot be read.
    """
    if (there := file.read_into(offset, buffer)) < len(buffer):
        raise DamageError(Damage.found(name, _ends(len(buffer), there), offset))


def check(name: str, offset: int, segment: Segment, data: bytes | memoryview) -> None:
    """Check that these bytes are a segment.

    Raises:
        DamageError: they are not.
    """
    if len(data) != segment.length:
        raise DamageError(Damage.found(name, _ends(segment.length, len(data)), offset))
    if digest_of(data) != segment.digest:
        raise other_bytes(name, offset, segment.length)


def other_bytes(name: str, offset: int, length: int) -> DamageError:
    """Return the error for bytes that differ from those that were written, by their digest.

    Args:
        name: the file's path in the checkpoint.
        offset: of the first byte.
        length: how many there are.
    """
    return DamageError(Damage.found(name, f"{length} bytes are not what was written", offset))


def check_present(source: Source, manifest: Manifest) -> None:
    """See that every file of a checkpoint is there, at the size that was written.

    Raises:
        DamageError: one is missing, or has another size.
        OSError: they cannot be listed.
    """
    confirmed(source.place, lambda: check_sizes(manifest, source.sizes()))


def check_sizes(manifest: Manifest, there: Mapping[str, int]) -> None:
    """See that every file of a checkpoint is there, at the size that was written.

    Args:
        manifest: of the checkpoint.
        there: the files that are there, and their sizes in bytes.

    Raises:
        DamageError: one is missing, or has another size.
    """
    for name, entry in manifest.files.items():
        size = there.get(name)
        if size is None:
            raise DamageError(Damage.found(name, "it is missing"))
        if size != entry.size:
            raise DamageError(Damage.found(name, _sizes(size, entry.size)))


def _ends(written: int, there: int) -> str:
    return f"{written} bytes were written from this offset on, and {there} are there"


def _sizes(there: int, written: int) -> str:
    return f"it has {there} bytes, and {written} were written"


# ---------------------------------------------------------------------- the whole checkpoint


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of verifying one file."""

    file: str
    size: int
    """Bytes that were read."""
    damages: tuple[Damage, ...] = ()


def verify(
    source: Source, manifest: Manifest, threads: int, on_read: Callable[[int], None] = lambda _: None
) -> Generator[Verified, None, None]:
    """Verify every byte of a checkpoint. To stop, close the iterator.

    Args:
        source: the checkpoint.
        manifest: its manifest, verified.
        threads: how many files to read at the same time.
        on_read: called with the number of bytes of each piece that was read, by several threads.

    Yields:
        The result for each file, as soon as it is known.

    Raises:
        OSError: a file cannot be read.
    """
    scan = _Scan(source, on_read)
    with ThreadPoolExecutor(threads, thread_name_prefix="muster-verify") as pool:
        work = [pool.submit(scan.verify, name, entry) for name, entry in sorted(manifest.files.items())]
        try:
            for one in work:
                yield one.result()
        finally:
            scan.stopped.set()
            for one in work:
                one.cancel()


class _StoppedError(Exception):
    """Nobody waits for the result any more."""


class _Scan:
    """Reads files of a checkpoint from their first byte to their last."""

    def __init__(self, source: Source, on_read: Callable[[int], None]) -> None:
        self._source = source
        self._on_read = on_read
        self.stopped = Event()

    def verify(self, name: str, entry: FileEntry) -> Verified:
        try:
            return confirmed(self._source.place, lambda: present(name, lambda: self._scan(name, entry)))
        except DamageError as error:
            return Verified(name, 0, (error.damage,))

    def _scan(self, name: str, entry: FileEntry) -> Verified:
        with self._source.open(name) as file:
            offset = 0
            buffer = memoryview(bytearray(min(PIECE, entry.size)))
            for segment in entry.segments:
                self._scan_segment(file, name, offset, segment, buffer)
                offset += segment.length
            if file.read(offset, 1):
                raise DamageError(
                    Damage.found(name, f"it goes on after the {offset} bytes that were written", offset)
                )
        return Verified(name, offset)

    def _scan_segment(
        self, file: OpenFile, name: str, offset: int, segment: Segment, buffer: memoryview
    ) -> None:
        found = xxhash.xxh3_128()
        done = 0
        while done < segment.length:
            if self.stopped.is_set():
                raise _StoppedError
            count = file.read_into(offset + done, buffer[: segment.length - done])
            if not count:
                raise DamageError(Damage.found(name, _ends(segment.length, done), offset))
            found.update(buffer[:count])
            done += count
            self._on_read(count)
        if found.digest() != segment.digest:
            raise other_bytes(name, offset, segment.length)


def present(name: str, read: Callable[[], T]) -> T:
    """Call a function that reads a file. An absent file is damage.

    Args:
        name: its path in the checkpoint.
        read: reads it.

    Raises:
        DamageError: it is certainly absent.
        OSError: it cannot be read.
    """
    try:
        return read()
    except ABSENT_FILE as error:
        raise DamageError(Damage.found(name, "it is missing")) from error


def confirmed(what: str, read: Callable[[], T]) -> T:
    """Call a function that reads. Call it again if it finds damage: the first read may have been at fault.

    Args:
        what: what it reads, for the log.
        read: reads, from a file that it opens itself.

    Raises:
        DamageError: both reads find damage.
        OSError: it cannot be read.
    """
    try:
        return retrying(what, read)
    except DamageError:
        return retrying(what, read)
