"""A rank of a job that Accelerate or Transformers' Trainer trains in shards: ``FOLDER KIND SHARDING [WHEN]``.

KIND is ``accelerate`` or ``transformers``, SHARDING ``fsdp`` or ``deepspeed``, ZeRO's second stage. Each step
takes 1 from each weight, and is saved. Every life of the job but the first resumes, and says which steps made
this rank's weights, and what its optimizer knows. At the third save rank 1 is killed, ``writing`` its shard,
or ``after`` it has written it.

Both frameworks shard on GPUs alone. So that they do it here, they are told that there are some, which are the
processor.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": os.environ["RANK"]}

import accelerate.state
import deepspeed
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils import ProjectConfiguration
from torch.distributed.checkpoint import filesystem
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from muster.worker import MusterError
from muster.worker.integrations import accelerate as ours
from muster.worker.integrations.transformers import CommitCallback, latest
from tests.support.jobs.fault import FAULTY, SAVES

ZERO: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


class Model(torch.nn.Module):
    """Its score falls by as much for each weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8, bias=False)
        torch.nn.init.zeros_(self.layer.weight)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).sum()}


def pretend() -> None:
    """Let the processor be the GPUs that the frameworks ask for."""
    place: Any = accelerate.state.PartialState
    place._prepare_backend = lambda *_, **__: ("gloo", accelerate.state.DistributedType.MULTI_GPU)

    def set_device(state: Any) -> None:
        state.device = torch.device("cpu")

    place.set_device = set_device
    # What DeepSpeed would compile for itself, for a minute or more.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def steps_in(model: Any, optimizer: Any) -> list[int]:
    """The steps that made this rank's part of the weights, and what its optimizer knows."""
    found: set[int] = set()
    for weights in model.parameters():
        own = weights.to_local() if hasattr(weights, "to_local") else weights
        found |= {-round(float(weight)) for weight in own.detach().flatten()}
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return sorted(found | {int(known["step"]) for known in optimizer.state.values()})


def doom(sharding: str, when: str) -> None:
    """Be killed while the next shard is written, or after that."""
    place: Any = torch if sharding == "deepspeed" else filesystem.FileSystemWriter
    name = "save" if sharding == "deepspeed" else "_write_data"
    theirs = getattr(place, name)

    def strike(*arguments: Any, **named: Any) -> None:
        if when == "after":
            theirs(*arguments, **named)
        time.sleep(0.5)  # The others go on as far as they get.
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(place, name, strike)


def with_accelerate(folder: Path, sharding: str, when: str) -> None:
    """Train by hand."""
    options: dict[str, Any] = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}
    if sharding == "deepspeed":
        options = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=ZERO)}
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = ours.commit_together(Accelerator(project_config=project, **options))
    model: Any = Model()
    model, optimizer = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), 1.0, weight_decay=0.0)
    )
    done = 0
    if ours.latest(folder) is not None:
        accelerator.load_state()
        steps = steps_in(model, optimizer)
        print("resumed", *steps, flush=True)
        done = steps[0]
    for step in range(done + 1, done + SAVES + 1):
        accelerator.backward(model(torch.ones(1, 8))["loss"])
        optimizer.step()
        optimizer.zero_grad()
        if step == FAULTY and when and accelerator.process_index == 1:
            doom(sharding, when)
        try:
            accelerator.save_state()
        except MusterError as error:
            print("failed", step, *str(error).split(), flush=True)
            raise
        print("saved", step, flush=True)


class Teller(TrainerCallback):  # type: ignore[misc]
    """Prints a line for each step that was saved."""

    def __init__(self, sharding: str, when: str) -> None:
        self.sharding = sharding
        self.when = when

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step:
            print("resumed", *steps_in(given["model"], given["optimizer"]), flush=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == FAULTY and self.when and args.process_index == 1:
            doom(self.sharding, self.when)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        print("saved", state.global_step, flush=True)


def with_trainer(folder: Path, sharding: str, when: str) -> None:
    """Let Transformers train."""
    options: dict[str, Any] = {
        "fsdp": True,
        "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT", "transformer_layer_cls_to_wrap": "Linear"},
    }
    if sharding == "deepspeed":
        options = {"deepspeed": ZERO}
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=SAVES if (last := latest(folder)) is None else int(last.name.split("-")[1]) + SAVES,
        per_device_train_batch_size=1,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_steps=1,
        save_total_limit=2,
        disable_tqdm=True,
        logging_strategy="no",
        report_to="none",
        **options,
    )
    data = [{"x": torch.ones(8)} for _ in range(100)]
    teller = Teller(sharding, when)
    trainer = Trainer(Model(), arguments, train_dataset=data, callbacks=[CommitCallback(), teller])
    trainer.remove_callback(PrinterCallback)
    try:
        trainer.train(resume_from_checkpoint=last is not None)
    except MusterError as error:
        print("failed", trainer.state.global_step, *str(error).split(), flush=True)
        raise


def main() -> None:
    """Resume, and train."""
    folder, kind, sharding = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    when = sys.argv[4] if len(sys.argv) > 4 else ""
    torch.set_num_threads(1)
    pretend()
    if sharding == "deepspeed" and kind == "accelerate":
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    (with_accelerate if kind == "accelerate" else with_trainer)(folder, sharding, when)


if __name__ == "__main__":
    main()
