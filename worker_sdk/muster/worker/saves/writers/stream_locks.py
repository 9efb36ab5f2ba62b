"""Gives the text streams of a forked child new locks.

A thread of the parent that was writing to a stream at the fork held its lock. One such thread logs that the
coordinator is lost. The fork copies the lock, but not the thread, so the child would wait for ever. Python
resets no such lock.
"""

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import suppress


def renew_stream_locks() -> None:
    """Give a new lock and an empty buffer to each stream that is printed or logged to.

    What was in the buffer is the parent's to write. Whoever holds a stream can use it: it is the same object.
    """
    for stream in _streams():
        buffer = getattr(stream, "buffer", None)
        if isinstance(buffer, io.BufferedWriter):
            with suppress(OSError, ValueError):  # It is closed, or has no file.
                # This makes the lock and the buffer, as it did when the stream was opened.
                io.BufferedWriter.__init__(buffer, buffer.raw)


def _streams() -> Iterator[object]:
    yield from (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            yield getattr(handler, "stream", None)
