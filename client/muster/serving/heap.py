"""The options of glibc's heap by which a server returns the memory of large messages to the system.

By default glibc takes large blocks from its heaps once it has freed one, and a few small blocks that stay
keep the pages around them. A server that had 400 MiB in use had 700 MiB in memory. The system's C library may
be another one, or an allocator may be preloaded: then nothing changes.
"""

import ctypes
import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeapOption:
    """One option of ``mallopt``."""

    number: int
    """Of glibc's ``malloc.h``."""
    variable: str
    """The environment variable by which the user may set it."""
    value: int


OPTIONS = (
    # A fixed threshold. Larger blocks are mappings of their own, which are gone once they are freed.
    HeapOption(-3, "MALLOC_MMAP_THRESHOLD_", 128 << 10),
    # Bytes that a heap may keep at its end, so that bursts of small messages do not move that end each time.
    HeapOption(-1, "MALLOC_TRIM_THRESHOLD_", 4 << 20),
    # The default is 8 for each core, and what a thread of gRPC has freed stays in its arena.
    HeapOption(-8, "MALLOC_ARENA_MAX", 2),
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
