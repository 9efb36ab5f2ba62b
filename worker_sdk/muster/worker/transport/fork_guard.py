"""Keeps forked children from using gRPC while their parent uses it.

Each use of gRPC has a :class:`GrpcUsage`. A child that is forked during a usage, or before gRPC's threads
have ended, would wait forever at its first call; it gets an error instead. When all usage and gRPC's threads
have ended, the next child may use gRPC.
"""

import gc
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from muster.worker.errors import MusterError

GRPC_THREADS = (
    b"event_engine",
    b"lifeguard",
    b"grpc_",
    b"timer_manager",
    b"default-execut",
    b"resolver-execut",
)
"""The prefixes of the names of gRPC's own threads, as Linux shows them (grpcio 1.66 to 1.85)."""
HANDLERS = "GRPC_ENABLE_FORK_SUPPORT"
"""The variable that turns gRPC's own fork handlers on or off. gRPC reads it at its import."""
PATIENCE = 1.0
"""Seconds that a fork waits for ending threads, and then for gRPC's threads; a few ms are usual."""
CHECK_INTERVAL = 0.001

_usages: list["GrpcUsage"] = []
"""The present ones. In a forked child they are its parent's, for good."""
_last: "GrpcUsage | None" = None
"""The last one that has ended, until gRPC's threads have ended, too."""
_ending: list[tuple[threading.Thread, float]] = []
"""Ending threads, each with the time until which a fork waits for it."""
_in_vain = False
"""Whether a fork has waited and gRPC still ran. Other code uses gRPC then; the next fork does not wait."""


class GrpcUsage:
    """A use of gRPC by this process, from now until :meth:`end`.

    Its methods take no lock, so a finalizer may call them anywhere.

    Args:
        what: the user of gRPC, for people.

    Raises:
        MusterError: this process was forked from one that uses gRPC.
    """

    def __init__(self, what: str) -> None:
        check()
        self.what = what
        self.process = os.getpid()
        _usages.append(self)

    def end(self) -> None:
        """End the usage. A second call, or one in a forked child, changes nothing."""
        global _last
        if self.process == os.getpid() and self in _usages:
            _last = self
            with suppress(ValueError):
                _usages.remove(self)

    def __enter__(self) -> "GrpcUsage":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def start_thread(what: str, name: str, target: Callable[..., None], *arguments: object) -> threading.Thread:
    """Start a daemon thread that uses gRPC while it runs.

    Args:
        what: the user of gRPC, for people.
        name: the thread's name.
        target: the thread's function.
        *arguments: the function's arguments.

    Raises:
        MusterError: this process was forked from one that uses gRPC.
        RuntimeError: the system has no room for another thread.
    """
    usage = GrpcUsage(what)

    def run() -> None:
        with usage:
            target(*arguments)

    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except BaseException:
        usage.end()
        raise
    return thread


def await_before_fork(thread: threading.Thread) -> None:
    """Make the next fork wait for an ending thread, up to ``PATIENCE`` from now.

    It takes no lock, so a finalizer may call it.

    Args:
        thread: a thread that :func:`start_thread` has started.
    """
    _ending.append((thread, time.monotonic() + PATIENCE))


def check() -> None:
    """Check that this process may use gRPC.

    Raises:
        MusterError: it was forked from one that uses gRPC.
    """
    for usage in _usages[:1]:
        if usage.process != os.getpid():
            raise forked(usage.what, usage.process)
    if _last is not None and _last.process != os.getpid():
        raise forked("open channels of gRPC", _last.process)


def forked(what: str, owner: int) -> MusterError:
    """Return the error for a forked child that uses its parent's property.

    Args:
        what: the property.
        owner: the parent's process id.
    """
    return MusterError(
        f"process {os.getpid()} was forked from process {owner}, which holds {what}: gRPC does not work "
        "across a fork. Report to the parent by exit code or pipe, or start the process by spawn."
    )


def handlers_hint() -> str | None:
    """Return what to do about gRPC's own fork handlers; None if they are off.

    They start gRPC's threads in a forked child, whose copies of the parent's streams are amid a call.
    """
    if os.environ.get(HANDLERS, "1").lower() in ("0", "f", "false", "n", "no"):
        return None
    return (
        "gRPC's fork handlers are on in this process, and may kill a forked child: import muster.worker "
        f"before grpc, or start the program with {HANDLERS}=0."
    )


def collect() -> None:
    """Collect channels that failed calls keep in reference cycles, if no usage is left.

    Call it after the end of a usage, but not from a finalizer: it runs any finalizers. For that reason it
    cannot be done before a fork either, when other modules hold their locks.
    """
    if not _usages and _last is not None and _grpc_runs():
        gc.collect()


def _await_end() -> None:
    """Wait before a fork for ending threads, then for gRPC if no usage is left."""
    global _last, _in_vain
    while _ending:
        thread, until = _ending.pop()
        thread.join(max(until - time.monotonic(), 0.0))
    last = _last
    if _usages or last is None or last.process != os.getpid():
        return
    deadline = time.monotonic() + (0.0 if _in_vain else PATIENCE)
    while (runs := _grpc_runs()) and time.monotonic() < deadline:
        time.sleep(CHECK_INTERVAL)
    _in_vain = runs
    if not runs and _last is last:  # Another thread may have used gRPC meanwhile.
        _last = None


def _grpc_runs(threads: Path = Path("/proc/self/task")) -> bool:
    """Return whether this process has threads of gRPC; True if the threads cannot be listed."""
    if not threads.is_dir():
        return True
    for thread in threads.iterdir():
        with suppress(OSError):  # It has just ended.
            if (thread / "comm").read_bytes().startswith(GRPC_THREADS):
                return True
    return False


os.register_at_fork(before=_await_end)
