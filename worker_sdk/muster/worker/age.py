"""For how long this process has been there: what tells a rank that comes late from a job started again."""

import os
import time
from pathlib import Path

_parted_at: float | None = None


def age() -> float:
    """Seconds since the process began, or since it last said goodbye: whoever comes again begins anew.

    Rather too little than too much, for the coordinator holds it against those who left meanwhile: 0 where
    the kernel does not tell.
    """
    try:
        running = time.clock_gettime(time.CLOCK_BOOTTIME) - _started()
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    known = running if _parted_at is None else min(running, time.monotonic() - _parted_at)
    return max(0.0, known)


def parted() -> None:
    """This process says goodbye now."""
    global _parted_at
    _parted_at = time.monotonic()


def _started() -> float:
    """When the process began, in seconds since the boot: field 22 of ``/proc/self/stat`` in proc(5)."""
    behind_the_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # In ticks, rounded down: it was there at the end of this one.
    return (int(behind_the_name[19]) + 1) / os.sysconf("SC_CLK_TCK")
