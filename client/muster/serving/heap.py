"""Returns the memory of freed messages to the system, where the C library is glibc.

By default glibc takes large blocks from its heaps once it has freed one, and a few small blocks that stay
keep the pages around them. A server that had 400 MiB in use had 700 MiB in memory. The system's C library may
be another one, or an allocator may be preloaded: then nothing changes.

Small blocks stay in the heaps. gRPC receives in blocks of 16 KiB. Only a trim returns the free pages between
those that are in use.
"""

import asyncio
import ctypes
import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeapOption:
    """One option of ``mallopt``."""

    number: int
    """The constant in glibc's ``malloc.h``."""
    variable: str
    """The environment variable by which the user may set it."""
    value: int


OPTIONS = (
    # A fixed threshold. Larger blocks are mappings of their own, which are gone once they are freed.
    HeapOption(-3, "MALLOC_MMAP_THRESHOLD_", 128 << 10),
    # Free bytes that a heap may keep at its end. Large blocks would be taken from a longer end.
    HeapOption(-1, "MALLOC_TRIM_THRESHOLD_", 256 << 10),
    # The default is 8 for each core, and what a thread of gRPC has freed stays in its arena.
    HeapOption(-8, "MALLOC_ARENA_MAX", 2),
)

TRIM_INTERVAL = 1.0
"""Seconds between two looks at the heaps."""
TRIM_BYTES = 16 << 20
"""Free bytes in all heaps above which they are trimmed."""
MIN_CHANGE = 1 << 20
"""Bytes by which the use of the heaps has changed if a trim is worth its while."""


class _Statistics(ctypes.Structure):
    """What ``mallinfo2`` returns: ten counters, of which the eighth and the ninth are of the heaps' bytes."""

    _fields_ = (
        ("others", ctypes.c_size_t * 7),
        ("used", ctypes.c_size_t),
        ("free", ctypes.c_size_t),
        ("top", ctypes.c_size_t),
    )


def return_freed_memory() -> None:
    """Set the options, but for those that the environment sets. Call it before threads start."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    for option in OPTIONS:
        if option.variable not in os.environ:
            mallopt(option.number, option.value)


class HeapTrimmer:
    """Returns the free pages of the heaps to the system.

    Args:
        most: free bytes in all heaps above which they are trimmed.
    """

    def __init__(self, most: int = TRIM_BYTES) -> None:
        self._most = most
        self._used = 0
        """Bytes that were in use at the last trim."""

    def trim(self) -> bool:
        """Trim the heaps if they hold many free bytes and their use has changed since the last trim.

        Returns:
            Whether the C library can do so.
        """
        try:
            library = ctypes.CDLL(None)
            count, trim = library.mallinfo2, library.malloc_trim
        except (AttributeError, OSError):
            return False
        count.restype = _Statistics
        statistics = count()
        # A page that was returned still counts as free.
        if statistics.free > self._most and abs(statistics.used - self._used) > MIN_CHANGE:
            trim(ctypes.c_size_t(0))
            self._used = statistics.used
        return True


async def keep_heaps_trimmed() -> None:
    """Trim the heaps again and again, in a thread: it takes milliseconds for many free blocks."""
    trimmer = HeapTrimmer()
    while True:
        if not await asyncio.to_thread(trimmer.trim):
            return
        await asyncio.sleep(TRIM_INTERVAL)
