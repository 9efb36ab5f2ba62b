"""The kernel's figures for this process and its children."""

import os
import time
from pathlib import Path


def cpu_seconds() -> float:
    """Return the processor time in seconds that all threads of this process have used."""
    return time.process_time()


def resident_bytes() -> int:
    """Return the bytes of this process's memory that are resident.

    Raises:
        OSError: ``/proc`` cannot be read.
    """
    pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def child_state(pid: int) -> str:
    """Return a process's state, as the kernel's letter.

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
    # The name before it, in parentheses, may contain spaces and parentheses, too.
    return stat.rpartition(b")")[2].split()[0].decode()
