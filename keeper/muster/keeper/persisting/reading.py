"""Reads a file of a keeper's folder piece by piece, verified while it is copied."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from muster.checkpoint.damage import Damage, DamageError
from muster.checkpoint.manifest import FileEntry
from muster.checkpoint.verification import other_bytes

PIECE = 8 * 2**20
"""Bytes that are copied at once."""


def verified_pieces(
    path: Path, name: str, entry: FileEntry, wait_for: Callable[[int], None]
) -> Iterator[memoryview]:
    """Yield a file's bytes. The last piece of each segment comes only if all of the segment is as written.

    So a copy that has its full size is a whole one.

    Args:
        path: the file.
        name: its path in the checkpoint.
        entry: its size and digests.
        wait_for: called with the number of bytes before each piece.

    Raises:
        DamageError: it is not what was written.
        OSError: it cannot be read.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        buffer = memoryview(bytearray(min(PIECE, entry.size)))
        offset = 0
        for segment in entry.segments:
            digest = xxhash.xxh3_128()
            done = 0
            while done < segment.length:
                count = os.preadv(handle, [buffer[: segment.length - done]], offset + done)
                if not count:
                    raise DamageError(Damage.found(name, "it ends too early", offset + done))
                digest.update(buffer[:count])
                done += count
                if done == segment.length and digest.digest() != segment.digest:
                    raise other_bytes(name, offset, segment.length)
                wait_for(count)
                yield buffer[:count]
            offset += segment.length
    finally:
        os.close(handle)
