"""A rank that trains and saves: ``FOLDER muster|c10d``, under torchrun.

It leaves a file with its moments on the monotonic clock: of its start, then of each step.
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

from muster.worker import Checkpointer

EVERY = 20
"""Steps between two saves."""
PACE = 0.05
"""Seconds of a step."""
NUMBERS = 1_000_000
"""Numbers in the model, 4 bytes each."""


def with_muster(folder: Path, state: dict[str, torch.Tensor]) -> Callable[[int], object]:
    """Load the newest checkpoint. Returns the function that saves."""
    checkpointer = Checkpointer(folder)
    checkpointer.resume(state)
    return lambda step: checkpointer.save(step, state)


def with_dcp(folder: Path, state: dict[str, torch.Tensor]) -> Callable[[int], object]:
    """Load the newest checkpoint that has its metadata. Returns the function that saves."""
    steps = [int(path.parent.name) for path in folder.glob("*/.metadata")]
    if steps:
        dcp.load(state, checkpoint_id=str(folder / str(max(steps))))
    # The thread that saves must not use the group of the training thread.
    group = dist.new_group(backend="gloo")
    saves: list[Future[Any]] = []

    def save(step: int) -> None:
        if saves:
            saves.pop().result()
        made: Any = dcp.async_save(state, checkpoint_id=str(folder / str(step)), process_group=group)
        saves.append(made)

    return save


def main() -> None:
    """Train until the process is killed."""
    started = time.monotonic()
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", timeout=timedelta(seconds=60))
    state = {"model": torch.zeros(NUMBERS), "step": torch.zeros(1)}
    save = (with_muster if kind == "muster" else with_dcp)(folder / "checkpoints", state)
    with (folder / f"rank-{os.getpid()}").open("w", buffering=1) as file:
        file.write(f"{started}\n")
        while True:
            total = torch.ones(1)
            dist.all_reduce(total)
            time.sleep(PACE)
            state["step"] += 1
            file.write(f"{time.monotonic()}\n")
            if (step := int(state["step"])) % EVERY == 0:
                save(step)


if __name__ == "__main__":
    main()
