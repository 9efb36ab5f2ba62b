"""Forks the child that writes, and sees that it lives.

A child is born with the locks that other threads held at the fork, and nobody to give them back. Python
itself takes such a lock before any code of ours runs (python/cpython#112275; fixed in 3.12, and late in
3.11): a thread of torch's that lets go of a tensor at that instant is enough. Such a child never shows that
it lives. It is killed, and another one is forked while the training thread still waits, so that it sees the
same.
"""

import contextlib
import gc
import logging
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass

from muster.worker.errors import MusterError
from muster.worker.saves.warning_filters import ignore_warning
from muster.worker.saves.writers import child
from muster.worker.saves.writers.writer_process import WriterProcess

logger = logging.getLogger(__name__)

SIGN_TIMEOUTS = (2.0, 8.0, 30.0)
"""Seconds that a child has to show that it lives, at the first attempt, the second and the last. It takes
milliseconds; a machine that is overloaded may need longer."""

BESIDE_THREADS = r"This process \(pid=\d+\) is multi-threaded, use of fork\(\)"
"""How Python's warning of a fork beside threads begins."""


@dataclass(frozen=True, slots=True)
class Child:
    """A child that lives, or has ended by itself."""

    process: WriterProcess
    report: int
    """The file descriptor on which it reports."""
    gate: int
    """The file descriptor on which it is told to write. If it is closed before, the child ends."""

    def let_write(self) -> None:
        """Tell it to write. It may have ended by itself."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.gate, b"w")

    def end(self) -> None:
        """Kill it, reap it, and close its descriptors."""
        self.process.kill("it was not needed")
        self.process.status()
        self.close()

    def close(self) -> None:
        """Close the descriptors of a child that has ended."""
        self.process.close()
        os.close(self.report)
        os.close(self.gate)


def fork(write: Callable[[], None], wait_for_copies: Callable[[], None] | None = None) -> Child:
    """Fork a child that writes.

    Args:
        write: what the child does.
        wait_for_copies: waits, in this process, for the copies that a GPU still makes to memory that the
            child reads. The child writes when it has returned.

    Raises:
        MusterError: none of the children that were forked has shown that it lives.
        OSError: the system has no room for another process.
        Exception: what ``wait_for_copies`` raised. The child has ended then.
    """
    child.flush()  # Else the child would write it once more.
    for seconds in SIGN_TIMEOUTS:
        forked = _begin(write)
        try:
            if child.wait_readable(forked.report, seconds):
                if wait_for_copies is not None:
                    wait_for_copies()
                forked.let_write()
                return forked
        except BaseException:
            forked.end()
            raise
        forked.end()
        logger.warning(
            "the writing process (pid %d) did not begin within %g s of its fork, and was killed: it was born "
            "with a lock that another thread held",
            forked.process.pid,
            seconds,
        )
    raise MusterError(
        f"{len(SIGN_TIMEOUTS)} writing processes were forked one after the other, and none began: each "
        "was born with a lock that another thread of this process held. Save with persistent=True, which "
        "forks nothing, or use Python 3.12 (python/cpython#112275)."
    )


def _begin(write: Callable[[], None]) -> Child:
    parent = os.getpid()
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    report, theirs = os.pipe()
    gate, opener = os.pipe()
    forked: Child | None = None
    pid = 0
    try:
        # A handler of the parent's must not run in the child, where it would raise into the training program.
        signal.pthread_sigmask(signal.SIG_BLOCK, child.BLOCKED)
        pid = _fork()
        if pid == 0:
            os.close(report)
            os.close(opener)
            child.run(write, theirs, gate, parent)
        forked = Child(WriterProcess(pid), report, opener)
        # Only the child is to hold them: so its end can be seen, too. Each is closed once, whatever happens.
        ours, theirs = theirs, -1
        os.close(ours)
        ours, gate = gate, -1
        os.close(ours)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        return forked
    except BaseException:
        if os.getpid() != parent:
            os._exit(child.FAILED)
        try:
            for ours in (theirs, gate):
                if ours >= 0:
                    os.close(ours)
            if forked is not None:
                forked.end()
            else:
                _end_unknown(pid or _born(report))
                os.close(report)
                os.close(opener)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        raise


def _born(report: int) -> int:
    """Return the process id of a child whose fork was interrupted before it returned the id.

    Returns:
        0 if there is no child, or it does not report its id. Then it ends by itself, at the latest with this
        process.
    """
    return (child.wait_readable(report, SIGN_TIMEOUTS[0]) and child.read_sign(report)) or 0


def _end_unknown(pid: int) -> None:
    """Send SIGKILL to a child that has no handle; 0 stands for no child."""
    if pid:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _fork() -> int:
    """Fork without a garbage collection in the child, from its first moment on.

    What Python itself does after a fork may set one off. It would run finalizers of the parent's objects,
    such as gRPC's, which wait for ever for locks of threads that the child does not have.
    """
    collects, pid = gc.isenabled(), -1
    gc.disable()
    try:
        # From Python 3.12 on: rightly, and the child is made for it.
        ignore_warning(BESIDE_THREADS, DeprecationWarning, re.escape(__name__))
        pid = os.fork()
        return pid
    finally:
        if collects and pid != 0:
            gc.enable()
