"""A rank of a job that trains with Accelerate: ``FOLDER MODE [WHO WHAT WHEN]``.

MODE is ``committed`` or ``plain``: with Muster's saves, or with Accelerate's own, the control; or
``endless``: committed, until it is killed. The weight is the number of the step that made it. Each step is
saved, and one checkpoint is kept. Every life of the job but the first resumes. At the third save rank WHO
does WHAT (``kill``, ``raise``) at WHEN: ``before`` the save, ``writing``, or ``after`` it has written. A rank
whose save failed goes on from the last checkpoint.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # Else accelerate says what it has found, where it finds DeepSpeed.

import torch
from accelerate import Accelerator
from accelerate import accelerator as place
from accelerate.utils import ProjectConfiguration

from muster.worker import MusterError
from muster.worker.integrations.accelerate import commit_together
from muster.worker.integrations.commit.numbered import numbered
from tests.support.jobs.fault import FAULTY, SAVES, strike
from tests.support.jobs.transformers_job import chance_at


def doom(model: torch.nn.Linear, what: str, when: str) -> None:
    """Let it go wrong once, at a moment of the save."""
    theirs: Any = place.save_accelerator_state

    def ours(*arguments: Any, **named: Any) -> Any:
        due = model.weight.item() == FAULTY
        if due:
            place.save_accelerator_state = theirs
            if when != "after":
                strike(what)
        written = theirs(*arguments, **named)
        if due:
            strike(what)
        return written

    place.save_accelerator_state = ours


def whole(folder: Path, step: int, ranks: int) -> str:
    """Whether each rank's part of a step's checkpoint is there, and of that step."""
    for rank in range(ranks):
        part = folder / f"checkpoint_{step - 1}" / f"random_states_{rank}.pkl"
        if not part.exists():
            return "torn"
        found = torch.load(part, weights_only=False)["torch_manual_seed"]
        if not torch.equal(found, chance_at(step, rank)):
            return "mixed"
    return "whole"


def main() -> None:
    """Resume, and train."""
    folder, mode = Path(sys.argv[1]) / "checkpoints", sys.argv[2]
    who, what, when = sys.argv[3:] or ("none", "", "")
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    torch.set_num_threads(1)
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    project = ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True, total_limit=1)
    accelerator: Any = Accelerator(cpu=True, project_config=project)
    if mode != "plain":
        accelerator = commit_together(accelerator)
    bare = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(bare.weight)
    accelerator.prepare(bare)

    def resume() -> None:
        accelerator.load_state()
        step = int(bare.weight.item())
        accelerator.project_configuration.iteration = step
        print("resumed", step, whole(folder, step, accelerator.num_processes), flush=True)

    if str(accelerator.process_index) == who and when != "before":
        doom(bare, what, when)
    if life > 0 and (mode == "plain" or numbered(folder, "checkpoint_")):
        resume()
    while mode == "endless" or bare.weight.item() < SAVES * (1 + life):
        with torch.no_grad():
            bare.weight += 1
        step = int(bare.weight.item())
        torch.random.set_rng_state(chance_at(step, accelerator.process_index))
        if (step, str(accelerator.process_index), when) == (FAULTY, who, "before"):
            strike(what)
        try:
            accelerator.save_state()
        except (MusterError, OSError) as error:
            print("failed", *str(error).split(), flush=True)
            resume()
        else:
            print("saved", step, flush=True)
    print("ended", step, flush=True)


if __name__ == "__main__":
    main()
