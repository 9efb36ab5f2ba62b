"""A rank of a small job that Slurm may end at any time, under torchrun or under ``srun`` alone: ``FOLDER``.

It trains until it is told to stop, or the file ``finish`` is in its folder. Each rank leaves a line in the
file ``rank-N`` for what it did: ``began STEP``, ``trained STEP``, ``saved STEP``, ``finished STEP``.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from muster.worker import Checkpointer, SavePoint

STEP_SECONDS = 0.1
NUMBERS = 1000
TRAINS_ON = 10
"""Steps after its begin at which a rank says that it trains on: a request to stop would end it sooner."""
STOPPED = 75
"""Exit code of a rank that is to be started again; torchrun's agents end with it by themselves."""


def train(folder: Path) -> bool:
    """Train this rank from the last checkpoint on, until it is told to stop or to finish.

    Returns:
        Whether it was told to stop.
    """
    state = {"weights": torch.zeros(NUMBERS)}
    checkpointer = Checkpointer(folder / "checkpoints")
    resumed = checkpointer.resume(state)
    step = resumed.step if resumed else 0
    # Each step adds 1 for each rank: a step that is missing, or was trained twice, shows.
    assert state["weights"][0] == step * dist.get_world_size(), (state["weights"][0], step)
    with SavePoint(signals=[signal.SIGTERM]) as point:
        say(folder, "began", step)
        trains_on = step + TRAINS_ON
        while not point.stop and not finishes(folder):
            step += 1
            gradient = torch.ones(NUMBERS)
            dist.all_reduce(gradient)
            state["weights"] += gradient
            time.sleep(STEP_SECONDS)
            if point.reached(step):
                checkpointer.save(step, state)
                checkpointer.finalize(blocking=True)
                say(folder, "saved", step)
                point.done()
            if step == trains_on:
                say(folder, "trained", step)
        if not point.stop:
            say(folder, "finished", step)
    checkpointer.close()
    return point.stop


def finishes(folder: Path) -> bool:
    """Return whether the job is to finish; all ranks say the same."""
    wanted = torch.tensor(int((folder / "finish").exists()))
    dist.all_reduce(wanted, dist.ReduceOp.MAX)
    return bool(wanted)


def say(folder: Path, what: str, step: int) -> None:
    """Leave a line for the test."""
    with (folder / f"rank-{dist.get_rank()}").open("a") as file:
        file.write(f"{what} {step}\n")


def main() -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="muster://")
    stopped = train(Path(sys.argv[1]))
    dist.destroy_process_group()
    if stopped and "TORCHELASTIC_RUN_ID" not in os.environ:
        sys.exit(STOPPED)


if __name__ == "__main__":
    main()
