"""What no save can be faster than: the fork of a large process, and the copy of a state from a GPU."""

import mmap
import multiprocessing as mp
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.saving.training import GIB, TENSOR_BYTES

GIVE_UP = 90.0
"""Seconds that one save may take."""
SPAWN = mp.get_context("spawn")


def measure_forks(sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """How long a fork takes as the resident memory grows, with small pages and with huge ones."""
    found = []
    for gib in sizes:
        for huge in (False, True):
            ours, theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=_fork, args=(gib, huge, repeats, theirs))
            process.start()
            theirs.close()
            seconds = expect(ours)
            process.join()
            found.append({"gib": gib, "huge_pages": huge, "seconds": seconds})
            print(
                f"fork  {gib} GiB  huge pages: {huge!s:<5}  {statistics.median(seconds) * 1000:.1f} ms",
                file=sys.stderr,
            )
    return found


def _fork(gib: int, huge: bool, repeats: int, pipe: Connection) -> None:
    memory = mmap.mmap(-1, gib * GIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    for _ in range(gib * GIB // TENSOR_BYTES):
        memory.write(bytes(TENSOR_BYTES))
    seconds = []
    for _ in range(repeats):
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        seconds.append(time.monotonic() - began)
        os.waitpid(pid, 0)
    pipe.send(seconds)


def measure_copies(sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """How long a state on a GPU takes to pinned memory that is there: what no stall can be below."""
    found = []
    for gib in sizes:
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=_copy, args=(gib, repeats, theirs))
        process.start()
        theirs.close()
        found.append({"gib": gib, "seconds": expect(ours)})
        process.join()
    return found


def _copy(gib: int, repeats: int, pipe: Connection) -> None:
    import torch

    number = gib * GIB // TENSOR_BYTES
    here = [torch.zeros(TENSOR_BYTES // 4, device="cuda") for _ in range(number)]
    there = [torch.empty(TENSOR_BYTES // 4, pin_memory=True) for _ in range(number)]
    seconds = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        began = time.monotonic()
        for source, target in zip(here, there, strict=True):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
    pipe.send(seconds[1:])


def expect(pipe: Connection, seconds: float = GIVE_UP) -> Any:  # noqa: ANN401
    """Return the next message; raise RuntimeError if none comes in time."""
    if not pipe.poll(seconds):
        raise RuntimeError(f"not through after {seconds:.0f} s")
    return pipe.recv()
