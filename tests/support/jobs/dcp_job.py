"""A rank of a job that saves with ``torch.distributed.checkpoint``: ``PATH MODE [WHO WHAT WHEN]``.

MODE is ``committed`` or ``plain``: with Muster's writer, or with torch's own, the control; or ``endless``:
committed, until it is killed. Each save is of the same name, and a step later. Every life of the job but the
first resumes. At the third save rank WHO does WHAT (``kill``, ``raise``, ``stop``) at WHEN: ``before`` the
save, ``planning`` it, ``writing``, or ``after`` it has written.
"""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from muster.worker.integrations.checkpoint import CommittedReader, CommittedWriter
from tests.support.jobs.fault import ENDLESS, FAULTY, SAVES, strike


def doom(writer: FileSystemWriter, what: str, when: str) -> None:
    """Let it go wrong at a moment of the save."""
    method = "prepare_local_plan" if when == "planning" else "_write_data"
    theirs: Callable[..., Any] = getattr(writer, method)

    def ours(*arguments: object) -> None:
        if when == "after":
            theirs(*arguments)
        strike(what)

    setattr(writer, method, ours)


def state_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Each rank has a key of its own, and so writes a file."""
    return {f"part-{rank}": torch.full((1000,), float(step))}


def steps_of(part: torch.Tensor) -> list[int]:
    """Return the steps of the weights in a part of the state."""
    return sorted({int(weight) for weight in part})


def main() -> None:
    """Resume, and save; print a line of each."""
    path, mode = Path(sys.argv[1]), sys.argv[2]
    who, what, when = sys.argv[3:] or ("none", "", "")
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    ours = mode != "plain"
    reader = CommittedReader(path) if ours else FileSystemReader(path)
    start = 0
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        state = state_of(rank, 0)
        dcp.load(state, storage_reader=reader)
        steps = steps_of(state[f"part-{rank}"])
        start = steps[0]
        print("resumed", *steps, flush=True)
    for step in range(start + 1, start + (ENDLESS if mode == "endless" else SAVES) + 1):
        writer = CommittedWriter(path) if ours else FileSystemWriter(path)
        if step == FAULTY and str(rank) == who:
            if when == "before":
                strike(what)
            doom(writer, what, when)
        try:
            dcp.save(state_of(rank, step), storage_writer=writer)
        except dcp.CheckpointException as error:  # Torch's is no Exception; any other ends the job.
            print("failed", step, *str(error).split(), flush=True)
        else:
            print("saved", step, flush=True)


if __name__ == "__main__":
    main()
