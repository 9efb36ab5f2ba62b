"""A rank that trains and saves a part of its own, under torchrun: ``FOLDER local|shared|c10d BYTES LOCAL``.

It leaves a file with its moments on the monotonic clock: ``start T``, ``loaded BEGIN END STEP``, and
``step T N``.
"""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from benchmarks.processes.slow_bucket import SCHEME
from muster.worker import Checkpointer

EVERY = 300
"""Steps between two saves."""
PACE = 0.05
"""Seconds of a step."""

State = dict[str, torch.Tensor]


def with_muster(place: str, state: State, local: Path | None) -> Callable[[int], object]:
    """Load the newest checkpoint. Returns the function that saves."""
    if local is None:
        checkpointer = Checkpointer(place, keep_last=2)
    else:
        checkpointer = Checkpointer(place, keep_last=2, local=local, replicas=1, persist_every=1000)
    checkpointer.resume(state)

    def save(step: int) -> None:
        checkpointer.finalize()
        checkpointer.save(step, state)

    return save


def with_dcp(place: str, state: State) -> Callable[[int], object]:
    """Load the newest checkpoint that has its metadata. Returns the function that saves."""
    folder = Path(place.removeprefix(f"{SCHEME}://"))
    steps = [int(path.parent.name) for path in folder.glob("*/.metadata")]
    if steps:
        dcp.load(state, storage_reader=FsspecReader(f"{place}/{max(steps)}"))
    group = dist.new_group(backend="gloo")
    saves: list[Future[Any]] = []

    def save(step: int) -> None:
        if saves:
            saves.pop().result()
        writer = FsspecWriter(f"{place}/{step}")
        made: Any = dcp.async_save(state, storage_writer=writer, process_group=group)
        saves.append(made)

    return save


def main() -> None:
    """Train until the process is killed."""
    started = time.monotonic()
    folder, kind, size, local = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", timeout=timedelta(seconds=60))
    state = {f"part-{dist.get_rank()}": torch.full((size // 4,), 0.5), "step": torch.zeros(1)}
    place = f"{SCHEME}://{folder}/checkpoints"
    began = time.monotonic()
    if kind == "c10d":
        save = with_dcp(place, state)
    else:
        save = with_muster(place, state, local if kind == "local" else None)
    step = int(state["step"])
    with (folder / f"rank-{os.getpid()}").open("w", buffering=1) as file:
        file.write(f"start {started}\nloaded {began} {time.monotonic()} {step}\n")
        while True:
            total = torch.ones(1)
            dist.all_reduce(total)
            time.sleep(PACE)
            step += 1
            state["step"] += 1
            file.write(f"step {time.monotonic()} {step}\n")
            if step % EVERY == 0:
                save(step)


if __name__ == "__main__":
    main()
