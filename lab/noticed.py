"""A training job that notes when each step ended: ``FOLDER STEP_SECONDS``, a rank of it under torchrun.

Each rank writes lines ``step NUMBER TIME`` and ``saved NUMBER TIME``, with times in seconds since 1970.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from muster.worker import Checkpointer, SavePoint

STEPS = 100_000


def main() -> None:
    """Train until a save after which training ends."""
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    state = {"weights": torch.zeros(1000)}
    checkpointer = Checkpointer(folder / "checkpoints")
    with (
        (folder / f"rank-{os.environ['RANK']}").open("a", buffering=1) as file,
        SavePoint(signals=[signal.SIGTERM]) as point,
    ):
        for step in range(1, STEPS):
            gradient = torch.ones(1000)
            dist.all_reduce(gradient)
            state["weights"] += gradient
            time.sleep(seconds)
            file.write(f"step {step} {time.time()}\n")
            if point.reached(step):
                checkpointer.save(step, state)
                checkpointer.finalize(blocking=True)
                file.write(f"saved {step} {time.time()}\n")
                point.done()
                if point.stop:
                    break
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
