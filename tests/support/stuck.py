"""A rank that is stuck in one of several ways: run as ``python -m tests.support.stuck KIND RANK WORLD``."""

import ctypes
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context

import torch
import torch.distributed as dist

from muster.worker import AsyncCallsQueue, AsyncRequest, GrpcBarrier, step

FOR_EVER = 600.0


def sleeps() -> None:
    time.sleep(FOR_EVER)


def in_a_collective() -> None:
    """To which the other one does not come."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        peer = get_context("spawn").Process(target=does_not_come, args=(store,))
        peer.start()
        try:
            dist.init_process_group("gloo", init_method=store, rank=0, world_size=2)
            dist.all_reduce(torch.ones(3))
        finally:
            peer.kill()


def does_not_come(store: str) -> None:
    dist.init_process_group("gloo", init_method=store, rank=1, world_size=2)
    sleeps()


def in_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def holds_the_interpreter() -> None:
    """In C code that does not give the interpreter's lock back."""
    ctypes.PyDLL(None).sleep(int(FOR_EVER))


def reads_a_pipe() -> None:
    readable, _ = os.pipe()
    os.read(readable, 1)


def main_has_ended() -> None:
    """It goes on in a thread that is no daemon."""
    threading.Thread(target=sleeps, name="goes on").start()


def saves() -> None:
    """In a save whose child does not come to an end."""
    barrier = GrpcBarrier(barrier_prefix="save", participants=[int(os.environ["RANK"])])
    queue = AsyncCallsQueue(barrier=barrier)
    queue.schedule_async_request(AsyncRequest(sleeps, (), []))
    queue.maybe_finalize_async_calls(blocking=True, no_dist=True)


KINDS: tuple[Callable[[], None], ...] = (
    sleeps,
    in_a_collective,
    in_a_lock,
    holds_the_interpreter,
    reads_a_pipe,
    main_has_ended,
    saves,
)


def main() -> None:
    """Join the barrier, say that it comes, and get stuck on the way."""
    GrpcBarrier(barrier_prefix="checkpoint")
    step(41)
    print("joined", flush=True)
    next(kind for kind in KINDS if kind.__name__ == sys.argv[1])()


if __name__ == "__main__":
    main()
