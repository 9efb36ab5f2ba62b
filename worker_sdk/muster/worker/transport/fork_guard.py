"""Which process speaks gRPC: a child that is forked from it meanwhile cannot.

Whatever speaks holds a :class:`Claim`. A child that is forked while one is held, or before gRPC's threads
have ended, would wait for ever at its first call; here it is told so. When all was given back, and gRPC has
ended, the next child may speak for itself.
"""

import gc
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from muster.worker.errors import MusterError

GRPCS_THREADS = (
    b"event_engine",
    b"lifeguard",
    b"grpc_",
    b"timer_manager",
    b"default-execut",
    b"resolver-execut",
)
"""How the names of gRPC's own threads begin, as Linux shows them (grpcio 1.66 to 1.85)."""
HANDLERS = "GRPC_ENABLE_FORK_SUPPORT"
"""The variable by which gRPC's own fork handlers are on or off, from the moment that it is imported."""
PATIENCE = 1.0
"""Seconds that a fork waits for threads that were told to end, and then for gRPC's; a few ms are usual."""
LOOK_INTERVAL = 0.001

_claims: list["Claim"] = []
"""Those that are held. In a forked child they are its parent's, for good."""
_last: "Claim | None" = None
"""The last that was given back, until gRPC's threads have ended as well."""
_ending: list[tuple[threading.Thread, float]] = []
"""Threads that were told to end, each with the time until which a fork waits for it."""
_in_vain = False
"""Whether a fork has waited for gRPC, which went on: others use it, and the next fork waits for nothing."""


class Claim:
    """That this process speaks gRPC, from now until it is given back.

    Its methods take no lock, so that a finalizer may call them at any place.

    Args:
        what: what it speaks for.

    Raises:
        MusterError: this process was forked from one that does.
    """

    def __init__(self, what: str) -> None:
        check()
        self.what = what
        self.process = os.getpid()
        _claims.append(self)

    def give_back(self) -> None:
        """It does no longer; doing so twice, or in a forked child, changes nothing."""
        global _last
        if self.process == os.getpid() and self in _claims:
            _last = self
            with suppress(ValueError):
                _claims.remove(self)

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()


def start_thread(what: str, name: str, target: Callable[..., None], *arguments: object) -> threading.Thread:
    """Start a daemon thread that speaks gRPC for as long as it runs.

    Args:
        what: what it speaks for.
        name: the thread's.
        target: what it does.
        *arguments: with what.

    Raises:
        MusterError: this process was forked from one that speaks gRPC.
        RuntimeError: the system has no room for another thread.
    """
    claim = Claim(what)

    def speak() -> None:
        with claim:
            target(*arguments)

    thread = threading.Thread(target=speak, name=name, daemon=True)
    try:
        thread.start()
    except BaseException:
        claim.give_back()
        raise
    return thread


def await_before_fork(thread: threading.Thread) -> None:
    """Make the next fork wait until a thread that was told to end has ended, up to ``PATIENCE`` from now.

    It takes no lock, so that a finalizer may call it.

    Args:
        thread: a thread that :func:`start_thread` has started.
    """
    _ending.append((thread, time.monotonic() + PATIENCE))


def check() -> None:
    """See that this process may speak gRPC.

    Raises:
        MusterError: it was forked from one that does.
    """
    for claim in _claims[:1]:
        if claim.process != os.getpid():
            raise forked(claim.what, claim.process)
    if _last is not None and _last.process != os.getpid():
        raise forked("open channels of gRPC", _last.process)


def forked(what: str, owner: int) -> MusterError:
    """The error for using in a forked child what belongs to its parent.

    Args:
        what: what it is.
        owner: the parent's process id.
    """
    return MusterError(
        f"process {os.getpid()} was forked from process {owner}, which holds {what}: gRPC does not work "
        "across a fork. Report to the parent by exit code or pipe, or start the process by spawn."
    )


def handlers_hint() -> str | None:
    """What to do about gRPC's own fork handlers; None if they are off.

    They start gRPC's threads in a forked child, where these find the parent's streams in midst of a call.
    """
    if os.environ.get(HANDLERS, "1").lower() in ("0", "f", "false", "n", "no"):
        return None
    return (
        "gRPC's fork handlers are on in this process, and may kill a forked child: import muster.worker "
        f"before grpc, or start the program with {HANDLERS}=0."
    )


def collect() -> None:
    """Free what failed calls have left of their channels in cycles, when nothing is claimed any more.

    For whoever gives back, unless it is a finalizer: this runs finalizers of anyone, so it cannot wait
    until a fork, before which other modules hold their locks.
    """
    if not _claims and _last is not None and _grpc_runs():
        gc.collect()


def _settle() -> None:
    """Wait before a fork for threads that were told to end; then for gRPC, if nothing claims it any more."""
    global _last, _in_vain
    while _ending:
        thread, until = _ending.pop()
        thread.join(max(until - time.monotonic(), 0.0))
    last = _last
    if _claims or last is None or last.process != os.getpid():
        return
    deadline = time.monotonic() + (0.0 if _in_vain else PATIENCE)
    while (runs := _grpc_runs()) and time.monotonic() < deadline:
        time.sleep(LOOK_INTERVAL)
    _in_vain = runs
    if not runs and _last is last:  # Another thread may have spoken meanwhile.
        _last = None


def _grpc_runs(threads: Path = Path("/proc/self/task")) -> bool:
    """Whether this process has threads of gRPC, ours or another's; taken to be so where it cannot be seen."""
    if not threads.is_dir():
        return True
    for thread in threads.iterdir():
        with suppress(OSError):  # It has just ended.
            if (thread / "comm").read_bytes().startswith(GRPCS_THREADS):
                return True
    return False


os.register_at_fork(before=_settle)
