"""A child process that writes: waits for its end, kills it, and gives it up if it does not end."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from muster.worker.saves.writers.child import readable

KILL_GRACE = 30.0
"""Seconds that a killed process has to end: freeing much memory takes some of them. A process that waits for
a file server that is gone does not end."""
MAX_FILES = 3
"""Number of open files that an error names for a process that does not end."""


class WriterProcess:
    """A child of this process.

    Its exit status is known unless another part of the program takes it first: by ignoring SIGCHLD, or by
    waiting for any child.

    Args:
        pid: its process id.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.reason: str | None = None
        """Why it was killed."""
        self._killed_at: float | None = None
        self._closing = threading.RLock()
        """Held to close its descriptors once, and use none afterwards: other files soon get their numbers."""
        self._handle: int | None = None
        with contextlib.suppress(ProcessLookupError):  # It has ended, and somebody has taken its status.
            self._handle = os.pidfd_open(pid)
        try:
            self._killed = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except BaseException:
            if self._handle is not None:
                os.close(self._handle)
            raise

    def kill(self, reason: str) -> None:
        """Send SIGKILL, unless it has ended.

        Args:
            reason: why, for people; the first reason is kept.
        """
        with self._closing:
            self.reason = self.reason or reason
            self._killed_at = self._killed_at or time.monotonic()
            if self._handle is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._handle, signal.SIGKILL)
                os.eventfd_write(self._killed, 1)

    def ended(self) -> bool:
        """Return whether it has ended."""
        return self._handle is None or bool(readable({self._handle}, 0))

    def wait(self, timeout: float, also: Iterable[int] = ()) -> bool:
        """Wait for its end, or until a file descriptor can be read.

        Args:
            timeout: seconds.
            also: the file descriptors.

        Returns:
            False if neither happened in time, or within :data:`KILL_GRACE` after it was killed.
        """
        if self._handle is None:
            return True
        wanted = {self._handle, *also}
        if self._killed_at is None:
            ready = readable({self._killed, *wanted}, timeout)
            if not ready or ready & wanted:
                return bool(ready)
        assert self._killed_at is not None
        return bool(readable(wanted, self._killed_at + KILL_GRACE - time.monotonic()))

    def status(self) -> int | None:
        """Return its exit status, negative for a signal; None if another part of the program has taken it."""
        if self._handle is None:
            return None
        try:
            ending = os.waitid(os.P_PIDFD, self._handle, os.WEXITED)
        except ChildProcessError:
            return None
        assert ending is not None
        return ending.si_status if ending.si_code == os.CLD_EXITED else -ending.si_status

    def stuck_text(self) -> str:
        """Return why a save failed: its writer was killed and does not end."""
        files = _open_files(self.pid)
        where = f"; its open files: {', '.join(files)}" if files else ""
        return (
            f"{self.reason}; it has not ended {KILL_GRACE:g} s after SIGKILL: it probably waits for a file "
            f"system that does not answer{where}"
        )

    def reap_later(self, reap: Callable[[], object]) -> None:
        """On another thread, wait for the end of a process that was given up.

        Args:
            reap: called then; it must close this.
        """

        def wait() -> None:
            if self._handle is not None:
                readable({self._handle}, None)
            reap()

        threading.Thread(target=wait, name=f"muster-reap-{self.pid}", daemon=True).start()

    def close(self) -> None:
        """Close its descriptors in this process."""
        with self._closing:
            if self._handle is not None:
                os.close(self._handle)
            self._handle = None
            if self._killed >= 0:
                os.close(self._killed)
            self._killed = -1


def _open_files(pid: int) -> list[str]:
    """Return files that a process has open and this one has not, for people. No file system is asked."""
    ours = set(_names(Path("/proc/self/fd")))
    listings = Path(f"/proc/{pid}/task").glob("*/fd")  # By threads: the first may have ended.
    names = [name for listing in listings for name in _names(listing) if name not in ours]
    return list(dict.fromkeys(names))[:MAX_FILES]


def _names(listing: Path) -> list[str]:
    names = []
    with contextlib.suppress(OSError):
        for entry in listing.iterdir():
            with contextlib.suppress(OSError):
                names.append(str(entry.readlink()))
    return [name for name in names if name.startswith("/") and not name.startswith("/dev/")]
