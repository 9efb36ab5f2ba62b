"""Gives a forked child text streams of its own.

A stream of the parent may be locked for ever in the child: by a thread that was writing to it at the fork,
such as one that logs that the coordinator is lost. A fork copies the lock, and not the thread. Python resets
no such lock.
"""

import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

_parents: list[object] = []
"""The parent's streams. If one were collected here, it would be flushed first, and so wait for its lock."""


def replace_streams() -> None:
    """Have all that is printed and logged from now on go to new streams, over the same file descriptors."""
    streams = _Streams()
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        for attribute in (name, f"__{name}__"):
            if (stream := getattr(sys, attribute)) is not None:
                _parents.append(stream)
                setattr(sys, attribute, streams.replacement(stream, descriptor))
    for handler in _handlers():
        if isinstance(handler.stream, io.TextIOWrapper):
            _parents.append(handler.stream)
            handler.stream = streams.replacement(handler.stream)


class _Streams:
    def __init__(self) -> None:
        self._made: dict[int, TextIO] = {}
        """By the identity of the parent's stream."""

    def replacement(self, stream: TextIO, otherwise: int | None = None) -> TextIO:
        """Return a stream to the file of another one; the other one itself if it has no open file.

        Args:
            stream: the parent's.
            otherwise: the file descriptor for an object that is not a stream of Python's own.
        """
        if id(stream) not in self._made:
            self._made[id(stream)] = self._make(stream, otherwise) or stream
        return self._made[id(stream)]

    def _make(self, stream: TextIO, otherwise: int | None) -> TextIO | None:
        with suppress(OSError, ValueError):
            descriptor = stream.fileno() if isinstance(stream, io.TextIOWrapper) else otherwise
            if descriptor is not None:
                encoding, errors = (getattr(stream, name, None) for name in ("encoding", "errors"))
                return os.fdopen(descriptor, "w", 1, encoding, errors, closefd=False)
        return None


def _handlers() -> Iterator["logging.StreamHandler[TextIO]"]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        if isinstance(logger, logging.Logger):
            yield from (one for one in logger.handlers if isinstance(one, logging.StreamHandler))
