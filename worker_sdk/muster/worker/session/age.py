"""The age of this process, which tells a late rank from a restarted job."""

import os
import time

_began = time.monotonic()


def age() -> float:
    """Return the seconds since this process imported this module, was forked, or last said goodbye.

    It must never be too large: the coordinator compares it with the times at which other processes left. So
    the kernel's age of the process does not do: after ``exec``, the same process runs another program.
    """
    return time.monotonic() - _began


def restart() -> None:
    """Start the age from 0: the process was forked, or says goodbye."""
    global _began
    _began = time.monotonic()


os.register_at_fork(after_in_child=restart)
