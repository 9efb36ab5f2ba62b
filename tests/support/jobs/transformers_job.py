"""A rank of a job that trains with Transformers' Trainer: the arguments of :mod:`.job`.

Two checkpoints are kept. The weight is the number of the step, and each rank's random numbers are what they
are to be at it. A rank whose save failed trains on from the last checkpoint.
"""

import json
import os
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # Else accelerate says what it has found, where it finds DeepSpeed.

import torch
from safetensors.torch import load_file
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from muster.worker.errors import MusterError
from muster.worker.integrations.transformers import CommitCallback, latest
from tests.support.jobs.fault import ENDLESS, FAULTY, SAVES
from tests.support.jobs.job import Arguments, say, say_failed


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
    """Trains, and prints a line for each step that was saved."""

    def __init__(self, given: Arguments) -> None:
        self.given = given
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            model.weight.fill_(state.global_step)
        torch.random.set_rng_state(chance_at(state.global_step, args.process_index))
        if state.global_step == FAULTY and (fault := self.given.take_fault()):
            fault.strike_in(self.trainer, "save_model" if fault.when == "before" else "_save_rng_state")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        say("saved", state.global_step)


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
    given = Arguments.read()
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    torch.set_num_threads(1)
    arguments = TrainingArguments(
        output_dir=str(given.folder),
        use_cpu=True,
        ddp_timeout=20,
        max_steps=ENDLESS if given.mode == "endless" else SAVES * (1 + given.generation),
        per_device_train_batch_size=1,
        save_steps=1,
        save_total_limit=2,
        disable_tqdm=True,
        logging_strategy="no",
        report_to="none",
    )
    data = [{"x": torch.tensor([float(n)]), "labels": torch.tensor([2.0 * n])} for n in range(8)]
    teller = Teller(given)
    callbacks = [teller] if given.is_plain else [CommitCallback(), teller]
    trainer = teller.trainer = Trainer(Line(), arguments, train_dataset=data, callbacks=callbacks)
    trainer.remove_callback(PrinterCallback)
    theirs = trainer._load_from_checkpoint

    def load(checkpoint: str, *rest: Any) -> None:
        theirs(checkpoint, *rest)
        step = checkpoint.rpartition("-")[2]
        say("resumed", step, whole(Path(checkpoint), given.world_size))

    trainer._load_from_checkpoint = load
    resumes = given.generation > 0 if given.is_plain else latest(given.folder) is not None
    try:
        trainer.train(resume_from_checkpoint=resumes)
    except (MusterError, OSError) as error:
        say_failed(trainer.state.global_step, error)
        trainer.train(resume_from_checkpoint=True)
    say("ended", trainer.state.global_step)


if __name__ == "__main__":
    main()
