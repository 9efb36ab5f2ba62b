"""Gives the text streams of a forked child new locks.

A thread of the parent that was writing to a stream at the fork held its lock. One such thread logs that the
coordinator is lost. The fork copies the lock, but not the thread. The child would wait for ever, because
Python resets no such lock.
"""

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any


def renew_stream_locks() -> None:
    """Give a new lock and an empty buffer to each stream that is printed or logged to.

    These are the standard streams and those of the handlers of all loggers. The bytes in a buffer are left to
    the parent. Each stays the same object for all that hold it.
    """
    for stream in _streams():
        # It may be any object; a save must not fail for it.
        with suppress(Exception):
            _renew(stream)
            _renew(stream.buffer)


def _renew(buffer: object) -> None:
    # __init__ makes the lock and the buffer, as it did when the file was opened.
    if isinstance(buffer, io.BufferedWriter):
        io.BufferedWriter.__init__(buffer, buffer.raw)
    elif isinstance(buffer, io.BufferedRandom):
        io.BufferedRandom.__init__(buffer, buffer.raw)


def _streams() -> Iterator[Any]:
    yield from (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            with suppress(Exception):
                yield handler.stream
