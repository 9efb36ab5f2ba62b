"""Notices between two requests that the keeper has ended, and replaces it.

While this rank waits for other nodes, it sends its keeper no request. But they may need the keeper's files.
"""

import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

from muster.worker.errors import MusterError
from muster.worker.saves.local.folder import RunningKeeper

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 5.0
"""Seconds for one attempt to connect."""
FIRST_PAUSE, MAX_PAUSE = 0.1, 30.0
"""Seconds between two replacements. Each pause is twice as long as the one before."""
STEADY = 60.0
"""Seconds after which the end of a keeper resets the pause."""
END_TIMEOUT = 2.0
"""Longest wait in seconds for the end of the thread, which is a daemon thread."""


class KeeperWatch:
    """Holds an idle connection to the keeper. When it ends, the keeper is replaced.

    A fork may happen at any time, since the thread waits in the kernel and holds no lock.

    Args:
        running: returns the keeper that runs; None if it is not known.
        replace: replaces it, unless it runs. It may take long.
    """

    def __init__(self, running: Callable[[], RunningKeeper | None], replace: Callable[[], object]) -> None:
        self._running = running
        self._replace = replace
        self._closed = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="muster-keeper-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watch, without waiting."""
        self._closed.set()
        with suppress(OSError):
            self._wake.send(b"\0")

    def close(self) -> None:
        """End the watch."""
        self.stop()
        self._thread.join(END_TIMEOUT)

    def _run(self) -> None:
        pause = FIRST_PAUSE
        try:
            while not self._closed.is_set():
                began = time.monotonic()
                self._await_end()
                if self._closed.is_set():
                    return
                try:
                    self._replace()
                except (MusterError, OSError) as error:
                    logger.warning("this node has no keeper now: %s", error)
                pause = FIRST_PAUSE if time.monotonic() - began > STEADY else min(2 * pause, MAX_PAUSE)
                self._sleep(pause)
        finally:
            self._wake.close()
            self._woken.close()

    def _await_end(self) -> None:
        """Return when the keeper has ended, or closes the connection."""
        running = self._running()
        if running is None:
            return
        address = urlsplit(running.url)
        try:
            connection = socket.create_connection((address.hostname, address.port), CONNECT_TIMEOUT)
        except OSError:
            return
        with connection:
            poll = select.poll()
            for one in (connection, self._woken):
                poll.register(one, select.POLLIN)
            poll.poll()

    def _sleep(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        if poll.poll(seconds * 1000):
            # A forked child that drops its copy of this object wakes this thread for nothing.
            self._woken.recv(4096)
