"""Retrying reads of shared storage: a request may fail once, and an error is never taken for absence."""

import logging
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

DELAYS = (0.1, 1.0, 5.0)
"""Seconds before each further attempt: an NFS server that restarts is usually back by then."""


def retrying(what: str, read: Callable[[], T], sleep: Callable[[float], None] = time.sleep) -> T:
    """Call a function that reads; call it again if it fails with an I/O error.

    ``FileNotFoundError`` and ``NotADirectoryError`` are proof of absence. They are raised immediately.

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
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            logger.warning("cannot read %s; retrying in %g s: %s", what, delay, error)
            sleep(delay)
    return read()


def is_file(path: Path) -> bool:
    """Return whether a path is a regular file, or a link to one.

    ``Path.is_file`` takes any I/O error for absence from Python 3.14 on.

    Args:
        path: it need not exist.

    Raises:
        OSError: it cannot be looked at.
    """
    try:
        return stat.S_ISREG(retrying(str(path), path.stat).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
