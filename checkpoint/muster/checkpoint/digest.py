"""Digests of a checkpoint's content, computed while it is written and checked while it is read.

They are XXH3 with 128 bits, the fastest hash of python-xxhash: 13 GiB/s, measured on one core, where zlib's
CRC-32 reaches 2.5 GiB/s. They find damage, but do not stop an attacker that can write a
manifest as well.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import xxhash

ALGORITHM = "xxh3-128"
"""The name of the digest in manifests."""
SIZE = 16
"""Bytes of a digest."""

Readable: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous piece of a file. The segments of a file follow each other from offset 0 to its end."""

    length: int
    """Bytes."""
    digest: bytes


def digest_of(data: Readable) -> bytes:
    """Compute the digest of some bytes."""
    return xxhash.xxh3_128_digest(data)


def file_digest(segments: Iterable[Segment]) -> bytes:
    """Compute the digest of a file: the digest of its segments' digests, joined."""
    return digest_of(b"".join(segment.digest for segment in segments))


class SegmentDigester:
    """Digests a file while it is written.

    The writer calls :meth:`cut` where a segment ends, so that each item of a file can be verified by itself.
    """

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._length = 0
        self._segments: list[Segment] = []
        self.size = 0
        """Bytes so far."""

    def update(self, data: Readable) -> None:
        """Add the next bytes of the file."""
        self._hash.update(data)
        count = data.nbytes if isinstance(data, memoryview) else len(data)
        self._length += count
        self.size += count

    def cut(self) -> None:
        """End the current segment here. An empty segment is dropped."""
        if self._length:
            self._segments.append(Segment(self._length, self._hash.digest()))
            self._hash = xxhash.xxh3_128()
            self._length = 0

    def segments(self) -> tuple[Segment, ...]:
        """End the file, and return its segments."""
        self.cut()
        return tuple(self._segments)
