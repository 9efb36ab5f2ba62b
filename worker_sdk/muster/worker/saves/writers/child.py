"""What a forked child does: write, report to its parent through a pipe, and end.

It shares the parent's memory as it was at the fork, and nothing else that it could harm. It does not touch
CUDA or gRPC. It closes the parent's sockets, resets the parent's signal handlers, and gives the text streams
new locks. It runs without garbage collection, which would run the finalizers of the parent's objects. It
ends without any cleanup.
"""

import contextlib
import gc
import os
import select
import signal
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from multiprocessing import util
from pathlib import Path
from typing import NoReturn

import torch

from muster.worker.saves.failure import MAX_TEXT, failure_text
from muster.worker.saves.writers.stream_locks import renew_stream_locks

IGNORED = (signal.SIGTERM, signal.SIGHUP)
"""The signals that a writing process ignores. To stop a rank, torchrun sends them to its whole process group,
and the rank's last saves are still to be written. A writing process ends with its rank, or by SIGKILL."""
BLOCKED = (signal.SIGINT, *IGNORED)
"""The signals that are blocked when a child begins, so that no handler of the parent's runs in it."""
SIGN = struct.Struct("=xi")
"""What a child reports when it lives and is about to write, and again when it has written: a zero, which no
text has, and its process id. A process that it leaves behind has another."""
MAX_POLL = 2**31 - 1
"""Milliseconds that ``poll`` takes at most: 24 days."""
PRINT_TIMEOUT = 5.0
"""Seconds that a child that has written may take to print what it has not printed yet."""
FAILED = 1
"""The exit status of a child whose function raised."""


def run(write: Callable[[], None], report: int, gate: int, parent: int) -> NoReturn:
    """Become the child: report that it lives, write when told to, report how that went, end.

    Args:
        write: what writes.
        report: the file descriptor on which it is reported.
        gate: the file descriptor on which it is told to write.
        parent: the parent's process id; when it ends, so does the child.
    """
    status = FAILED
    try:
        _settle_down(report, parent)
        os.write(report, SIGN.pack(os.getpid()))
        if not os.read(gate, 1):
            raise InterruptedError("the save was given up before the child was told to write.")
        write()
        os.write(report, SIGN.pack(os.getpid()))
        _print_the_rest()
        status = 0
    except BaseException as error:
        os.write(report, failure_text(error).encode("utf-8", "backslashreplace"))
    finally:
        os._exit(status)


def _settle_down(report: int, parent: int) -> None:
    gc.disable()
    renew_stream_locks()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ignore_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
    # As in any child of multiprocessing: a manager's proxy opens a connection of its own, instead of using
    # the parent's, whose number would soon be another file's.
    util._run_after_forkers()  # type: ignore[attr-defined]
    _replace_sockets(report)
    # The parent's threads are not here: work that was shared among them would wait for ever.
    torch.set_num_threads(1)
    threading.Thread(target=die_with, args=(parent,), daemon=True).start()


def _print_the_rest() -> None:
    """Write out what was printed, or end: some other object of the parent may have had the stream's lock."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGALRM,))
    signal.setitimer(signal.ITIMER_REAL, PRINT_TIMEOUT)
    flush()


def ignore_signals() -> None:
    """Ignore the signals that stop a rank's process group."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)


def _replace_sockets(spared: int) -> None:
    """Replace the parent's sockets by ``/dev/null``, so that connections end with the parent, not the child.

    Their numbers stay taken: objects of the parent may still close them here, and must not close a file that
    was opened since.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for entry in list(Path("/proc/self/fd").iterdir()):
        number = int(entry.name)
        if number <= 2 or number == spared:
            continue
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.dup2(nothing, number, inheritable=False)
        except OSError:
            continue  # It was the listing's own.
    os.close(nothing)


def read_sign(report: int) -> int | None:
    """Return the process id that a child reports; None if it reports no id."""
    said = os.read(report, SIGN.size)
    return SIGN.unpack(said)[0] if said.startswith(b"\0") else None


def read_report(report: int, pid: int) -> tuple[bool, str]:
    """Read what a child that has ended has reported.

    Args:
        report: the file descriptor on which it reported.
        pid: its process id.

    Returns:
        Whether it has written, and what else it has said: why it has not, or could not print.
    """
    # A process that it has left behind may hold the pipe's other end: do not wait for that to be closed.
    os.set_blocking(report, False)
    try:
        said = os.read(report, MAX_TEXT * 2)
    except BlockingIOError:
        said = b""
    sign = SIGN.pack(pid)
    return said.count(sign) > 1, said.replace(sign, b"").decode("utf-8", "replace")


def die_with(parent: int) -> None:
    """End when the parent ends: a rank that died is restarted, and must not meet its own past at work."""
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(FAILED)
    if os.getppid() == parent:  # Else the number is another process's by now.
        wait_readable(watched)
    os._exit(FAILED)


def wait_readable(handle: int, timeout: float | None = None) -> bool:
    """Wait until a file descriptor can be read.

    Args:
        handle: the file descriptor.
        timeout: seconds; None waits for ever.

    Returns:
        Whether it can be read.
    """
    return bool(readable((handle,), timeout))


def readable(handles: Iterable[int], timeout: float | None) -> set[int]:
    """Wait until one of several file descriptors can be read, whatever its number: ``select`` stops at 1023.

    Args:
        handles: the file descriptors.
        timeout: seconds; None waits for ever.

    Returns:
        The descriptors that can be read.
    """
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    milliseconds = None if timeout is None else min(max(0.0, timeout) * 1000, MAX_POLL)
    return {handle for handle, _ in poll.poll(milliseconds)}


def flush() -> None:
    """Write out what was printed; a stream that cannot take it is no reason to fail a save."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
