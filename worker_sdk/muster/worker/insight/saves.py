"""The processes that write a save for this one.

No lock guards the list: a stuck thread must not block a report. Each operation on it is atomic in the
interpreter.
"""

import contextlib
import os

_pids: list[int] = []
"""One entry for each write under way; a worker may have several writes."""


def begin(pid: int) -> None:
    """Note that a write has started.

    Args:
        pid: the writing process.
    """
    _pids.append(pid)


def end(pid: int) -> None:
    """Note that a write has ended; an unknown one changes nothing.

    Args:
        pid: the writing process.
    """
    with contextlib.suppress(ValueError):
        _pids.remove(pid)


def under_way() -> list[int]:
    """Return the writing processes, each once."""
    return sorted(set(_pids))


# In a forked child the entries are its siblings, which write for its parent.
os.register_at_fork(after_in_child=lambda: _pids.clear())
