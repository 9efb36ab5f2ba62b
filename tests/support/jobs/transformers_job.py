"""A rank of a job that trains with Transformers' Trainer: ``FOLDER MODE [WHO WHAT WHEN]``.

MODE is ``committed`` or ``plain``: with Muster's callback, or without it, the control; or ``endless``:
committed, until it is killed. Each step is saved, and two checkpoints are kept. The weight is the number of
the step, and each rank's random numbers are what they are to be at it. Every life of the job but the first
resumes. At the third step rank WHO does WHAT (``kill``, ``raise``) at WHEN: ``before`` the save, ``writing``,
or ``after`` it has written. A rank whose save failed trains on from the last checkpoint.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # Else accelerate says what it has found, where it finds DeepSpeed.

import torch
from safetensors.torch import load_file
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from muster.worker import MusterError
from muster.worker.integrations.transformers import CommitCallback, latest
from tests.support.jobs.fault import ENDLESS, FAULTY, SAVES, strike


class Line(torch.nn.Module):
    """The least that can be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.weight * x - labels) ** 2).mean()}


def chance_at(step: int, rank: int) -> torch.Tensor:
    """What a rank's random numbers are to come from at a step."""
    return torch.Generator().manual_seed(1000 * step + rank).get_state()


class Teller(TrainerCallback):  # type: ignore[misc]
    """Prints a line for each step that was saved."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            model.weight.fill_(state.global_step)
        torch.random.set_rng_state(chance_at(state.global_step, args.process_index))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        print("saved", state.global_step, flush=True)


def doom(trainer: Trainer, what: str, when: str) -> None:
    """Let it go wrong once, at a moment of the save."""
    name = "save_model" if when == "before" else "_save_rng_state"
    theirs = getattr(trainer, name)

    def ours(*arguments: Any, **named: Any) -> None:
        if trainer.state.global_step != FAULTY:
            theirs(*arguments, **named)
            return
        setattr(trainer, name, theirs)
        if when == "after":
            theirs(*arguments, **named)
        strike(what)

    setattr(trainer, name, ours)


def whole(checkpoint: Path, ranks: int) -> str:
    """Whether each rank's part is there, and all that was written is of the checkpoint's step."""
    parts = [checkpoint / f"rng_state_{rank}.pth" for rank in range(ranks)]
    if not all(part.exists() for part in parts):
        return "torn"
    step = int(checkpoint.name.rpartition("-")[2])
    steps = {
        json.loads((checkpoint / "trainer_state.json").read_text())["global_step"],
        torch.load(checkpoint / "scheduler.pt")["last_epoch"],
        int(load_file(checkpoint / "model.safetensors")["weight"]),
    }
    chances = [torch.load(part, weights_only=False)["cpu"] for part in parts]
    as_they_were = all(torch.equal(chance, chance_at(step, rank)) for rank, chance in enumerate(chances))
    return "whole" if steps == {step} and as_they_were else "mixed"


def main() -> None:
    """Resume, and train."""
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    who, what, when = sys.argv[3:] or ("none", "", "")
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    torch.set_num_threads(1)
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        ddp_timeout=20,
        max_steps=ENDLESS if mode == "endless" else SAVES * (1 + life),
        per_device_train_batch_size=1,
        save_steps=1,
        save_total_limit=2,
        disable_tqdm=True,
        logging_strategy="no",
        report_to="none",
    )
    data = [{"x": torch.tensor([float(n)]), "labels": torch.tensor([2.0 * n])} for n in range(8)]
    callbacks = [Teller()] if mode == "plain" else [CommitCallback(), Teller()]
    trainer = Trainer(Line(), arguments, train_dataset=data, callbacks=callbacks)
    trainer.remove_callback(PrinterCallback)
    theirs = trainer._load_from_checkpoint

    def load(checkpoint: str, *rest: Any) -> None:
        theirs(checkpoint, *rest)
        step = checkpoint.rpartition("-")[2]
        print("resumed", step, whole(Path(checkpoint), arguments.world_size), flush=True)

    trainer._load_from_checkpoint = load
    if str(arguments.process_index) == who:
        doom(trainer, what, when)
    resumes = life > 0 if mode == "plain" else latest(folder) is not None
    try:
        trainer.train(resume_from_checkpoint=resumes)
    except (MusterError, OSError) as error:
        print("failed", *str(error).split(), flush=True)
        trainer.train(resume_from_checkpoint=True)
    print("ended", trainer.state.global_step, flush=True)


if __name__ == "__main__":
    main()
