"""What a forked child does: write, report to its parent through a pipe, and end.

It shares the parent's memory as it was at the fork, and nothing else that it could harm: it does not touch
CUDA or gRPC, closes the parent's sockets, takes the signals' default actions, runs without garbage collection
(which would run the finalizers of the parent's objects) and ends without any cleaning up.
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
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from typing import NoReturn

import torch

from muster.worker.saves.failure import failure_text

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that end a child; they are blocked when it begins."""
SIGN = struct.Struct("=xi")
"""What a child reports first, when it lives and is about to write: a zero, which no text begins with, and its
process id."""
FAILED = 1
"""The exit status of a child whose function raised."""


def run(write: Callable[[], None], report: int, parent: int) -> NoReturn:
    """Become the child: report that it lives, write, report a failure, end.

    Args:
        write: what writes.
        report: the file descriptor on which that is reported.
        parent: the parent's process id; when it ends, so does the child.
    """
    status = FAILED
    try:
        _settle_down(report, parent)
        os.write(report, SIGN.pack(os.getpid()))
        write()
        flush()
        status = 0
    except BaseException as error:
        os.write(report, failure_text(error).encode("utf-8", "backslashreplace"))
    finally:
        os._exit(status)


def _settle_down(report: int, parent: int) -> None:
    gc.disable()
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    # As in any child of multiprocessing: a manager's proxy opens a connection of its own, instead of using
    # the parent's, whose number would soon be another file's.
    util._run_after_forkers()  # type: ignore[attr-defined]
    _close_sockets(report)
    # The parent's threads are not here: work that was shared among them would wait for ever.
    torch.set_num_threads(1)
    threading.Thread(target=die_with, args=(parent,), daemon=True).start()


def _close_sockets(spared: int) -> None:
    """The other side of a connection must see it end with the parent, not with the child."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        number = int(entry.name)
        if number <= 2 or number == spared:
            continue
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)
        except OSError:
            continue  # It was the listing's own.


def read_sign(report: int) -> int | None:
    """The process id that a child reports; None if there is none, or it is about to end without."""
    said = os.read(report, SIGN.size)
    return SIGN.unpack(said)[0] if said.startswith(b"\0") else None


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
    """Wait until a file descriptor can be read, whatever its number: ``select`` stops at 1023.

    Args:
        handle: the file descriptor.
        timeout: seconds; None waits for ever.

    Returns:
        Whether it can be read.
    """
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(None if timeout is None else timeout * 1000))


def flush() -> None:
    """Write out what was printed; a stream that cannot take it is no reason to fail a save."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
