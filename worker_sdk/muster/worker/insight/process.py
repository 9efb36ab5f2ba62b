"""What the kernel says of this process and its children."""

import os
import time
from pathlib import Path


def cpu_seconds() -> float:
    """Processor time that this process has used, by all its threads."""
    return time.process_time()


def resident_bytes() -> int:
    """How much of its memory is in the machine's.

    Raises:
        OSError: ``/proc`` cannot be read.
    """
    pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def child_state(pid: int) -> str:
    """How a process stands, in one letter, as the kernel has it.

    R runs, S sleeps, D waits for the disk, T is stopped, Z has ended.

    Args:
        pid: its process id.

    Returns:
        The letter; empty if it cannot be read.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    # The name comes before, in parentheses, and may hold anything, also spaces and parentheses.
    return stat.rpartition(b")")[2].split()[0].decode()
