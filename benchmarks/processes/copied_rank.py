"""A rank that trains and saves to its node, under torchrun: ``FOLDER REPLICAS BYTES waits|computes LOCAL``.

A step changes one tensor of the state, and either waits, as for a GPU, or computes on its core. It leaves a
file of wall-clock times: ``step T`` at a step's end, ``save T STEP`` when a save begins, and
``local T STEP STALL`` when it is finalized, with the seconds for which it stopped training.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from muster.worker import Checkpointer

TENSOR_BYTES = 16 * 2**20
PACE = 0.02
"""Seconds of a step that waits."""
WARM_UP = 5.0
"""Seconds until the first save."""
EVERY = 15.0
"""Seconds between two saves."""


def main() -> None:
    """Train until the process is killed."""
    folder, replicas, size, computes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    state = {f"{rank}-{number}": torch.zeros(TENSOR_BYTES // 4) for number in range(size // TENSOR_BYTES)}
    tensors = list(state.values())
    factor = torch.rand(512, 512)
    stalls: list[float] = []
    checkpointer = Checkpointer(
        folder / "checkpoints",
        local=Path(sys.argv[5]),
        replicas=replicas,
        persist_every=1000,
        on_saved=lambda timings: stalls.append(timings.stall),
    )
    step, next_save = 0, time.time() + WARM_UP
    with (folder / f"rank-{os.getpid()}").open("w", buffering=1) as file:
        while True:
            saves = torch.tensor([float(rank == 0 and time.time() >= next_save)])
            dist.all_reduce(saves)
            tensors[step % len(tensors)].add_(1)
            if computes == "computes":
                for _ in range(8):
                    torch.mm(factor, factor)
            else:
                time.sleep(PACE)
            step += 1
            file.write(f"step {time.time()}\n")
            for saved in checkpointer.finalize():
                file.write(f"local {time.time()} {saved} {stalls.pop()}\n")
            if saves.item():
                file.write(f"save {time.time()} {step}\n")
                checkpointer.save(step, state)
                next_save = time.time() + EVERY


if __name__ == "__main__":
    main()
