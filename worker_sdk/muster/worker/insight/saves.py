"""The processes that write a save for this one.

No lock guards them: a thread that is stuck must not keep another from asking. Each operation on the list is
one that the interpreter does at once.
"""

import contextlib
import os

_pids: list[int] = []
"""One for each write under way: a worker may have several before it."""


def begin(pid: int) -> None:
    """A write has begun.

    Args:
        pid: the process that writes.
    """
    _pids.append(pid)


def end(pid: int) -> None:
    """A write has ended; one that never began changes nothing.

    Args:
        pid: the process that wrote.
    """
    with contextlib.suppress(ValueError):
        _pids.remove(pid)


def under_way() -> list[int]:
    """The processes that are writing, each once."""
    return sorted(set(_pids))


# In a forked child they are its siblings, and write for its parent.
os.register_at_fork(after_in_child=lambda: _pids.clear())
