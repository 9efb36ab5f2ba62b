"""A small training job that is told to end: ``FOLDER MODE NUMBERS``, a rank of it under torchrun.

With MODE ``point`` its ranks save at a save point. With ``slow`` they have begun a save before, whose writers
wait for the file ``gate``. With ``stuck`` rank 1 hangs in its third step until that file exists. With
``alone`` each rank saves for itself when it has a signal, as scripts do: the control, which tears. Its state
has NUMBERS of 4 bytes.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from muster.worker import Checkpointer, SavePoint

STEPS = 100_000
STUCK_AT = 3
"""The step in which a rank hangs."""
NUMBERS = 1000
"""What the ranks reduce in each step."""


def say(folder: Path, what: str, step: int) -> None:
    """Leave a line for the test: what this rank did, and at which step, or how many milliseconds are left."""
    with (folder / f"rank-{os.environ['RANK']}").open("a") as file:
        file.write(f"{what} {step}\n")


def with_point(folder: Path, numbers: int, *, slow: bool = False, stuck: bool = False) -> None:
    """Save at one step of all ranks."""
    state = {"weights": torch.zeros(numbers)}
    checkpointer = Checkpointer(folder / "checkpoints")
    start = checkpointer.load(state).step if checkpointer.latest() else 0
    with SavePoint(signals=[signal.SIGTERM]) as point:
        say(folder, "began", start)
        if slow:
            checkpointer.save(start, state)
        for step in range(start + 1, STEPS):
            if stuck and step == STUCK_AT and os.environ["RANK"] == "1":
                hang(folder, "stuck", step)
            train(state["weights"])
            if point.reached(step):
                if point.deadline is not None:
                    say(folder, "left", round((point.deadline - time.monotonic()) * 1000))
                checkpointer.save(step, state)
                checkpointer.finalize(blocking=True)
                say(folder, "saved", step)
                point.done()
                if point.stop:
                    break
    checkpointer.close()


def hang(folder: Path, what: str, step: int) -> None:
    """Leave a line, and do nothing until the test makes the file ``gate``."""
    say(folder, what, step)
    while not (folder / "gate").exists():
        time.sleep(0.01)


def with_a_slow_save(folder: Path, numbers: int) -> None:
    """As :func:`with_point`, while another save is under way."""
    write = FileSystemWriter.write_data

    def late(*arguments: Any) -> Any:
        hang(folder, "writing", 0)
        return write(*arguments)

    FileSystemWriter.write_data = late  # type: ignore[assignment]
    with_point(folder, numbers, slow=True)


def alone(folder: Path, numbers: int) -> None:
    """Save on the signal alone."""
    signals: list[int] = []

    def tell(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    signal.signal(signal.SIGTERM, tell)
    say(folder, "began", 0)
    weights = torch.zeros(numbers)
    for step in range(1, STEPS):
        if signals:
            say(folder, "saved", step)
            break
        train(weights)


def train(weights: torch.Tensor) -> None:
    """One step, with a collective."""
    gradient = torch.ones(NUMBERS)
    dist.all_reduce(gradient)
    weights[:NUMBERS] += gradient
    time.sleep(0.01)


def main() -> None:
    """Train until told to end."""
    folder, mode, numbers = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    modes: dict[str, Callable[[Path, int], None]] = {
        "point": with_point,
        "slow": with_a_slow_save,
        "stuck": partial(with_point, stuck=True),
        "alone": alone,
    }
    modes[mode](folder, numbers)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
