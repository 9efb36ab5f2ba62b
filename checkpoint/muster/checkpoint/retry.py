"""Retrying reads of shared storage: a request may fail once, and an error is never taken for absence.

``os.path.lexists`` and ``os.path.realpath`` take any I/O error for absence, and so do ``Path.exists``,
``Path.is_dir``, ``Path.is_file`` and ``Path.is_symlink`` from Python 3.14 on. The functions here raise it.
"""

import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

ABSENT = (FileNotFoundError, NotADirectoryError)
"""Errors that prove that nothing has a path. No other error does."""
ABSENT_FILE = (*ABSENT, IsADirectoryError)
"""Errors that prove that no file has a path. No other error does."""
DELAYS = (0.1, 1.0, 5.0)
"""Seconds before each further attempt: an NFS server that restarts is usually back by then."""


def retrying(what: str, read: Callable[[], T], sleep: Callable[[float], None] = time.sleep) -> T:
    """Call a function that reads; call it again if it fails with an I/O error.

    The errors of :data:`ABSENT` are raised immediately.

    Args:
        what: the name of what is read, for the log.
        read: the function that reads.
        sleep: waits for a number of seconds.

    Raises:
        OSError: what the last attempt raised.
    """
    for delay in DELAYS:
        try:
            return read()
        except ABSENT:
            raise
        except OSError as error:
            logger.warning("cannot read %s; retrying in %g s: %s", what, delay, error)
            sleep(delay)
    return read()


def is_file(path: Path) -> bool:
    """Return whether a path is a regular file, or a link to one.

    Args:
        path: it need not exist.

    Raises:
        OSError: it cannot be looked at.
    """
    return stat.S_ISREG(_mode(path, path.stat))


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder, or a link to one. Arguments and errors: see :func:`is_file`."""
    return stat.S_ISDIR(_mode(path, path.stat))


def is_link(path: Path) -> bool:
    """Return whether a path is a symbolic link. Arguments and errors: see :func:`is_file`."""
    return stat.S_ISLNK(_mode(path, path.lstat))


def exists(path: Path) -> bool:
    """Return whether a path exists. A broken link does not. Arguments and errors: see :func:`is_file`."""
    return _mode(path, path.stat) != 0


def lexists(path: Path) -> bool:
    """Return whether a path exists. A broken link does. Arguments and errors: see :func:`is_file`."""
    return _mode(path, path.lstat) != 0


def resolved(path: Path) -> Path:
    """Return the absolute path without links. Arguments and errors: see :func:`is_file`."""
    try:
        return Path(retrying(str(path), lambda: os.path.realpath(path, strict=True)))
    except ABSENT:
        return Path(os.path.realpath(path))


def _mode(path: Path, look: Callable[[], os.stat_result]) -> int:
    """Return the mode that a call of ``stat`` finds; 0 if the path does not exist."""
    try:
        return retrying(str(path), look).st_mode
    except ABSENT:
        return 0
