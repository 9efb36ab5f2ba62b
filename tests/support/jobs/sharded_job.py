"""A rank of a job that Accelerate or Transformers' Trainer trains in shards: the arguments of :mod:`.job`.

OWN is ``KIND SHARDING``. KIND is ``accelerate`` or ``transformers``, SHARDING ``fsdp`` or ``deepspeed``,
ZeRO's second stage. Each step takes 1 from each weight. A generation that resumes says which steps made this
rank's weights, and what its optimizer knows. The fault strikes in the writing of a shard.

Both frameworks shard on GPUs alone. So that they do it here, they are told that there are some, which are the
processor.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": os.environ["RANK"]}

import accelerate.state
import deepspeed
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils import ProjectConfiguration
from torch.distributed.checkpoint import filesystem
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from muster.worker.errors import MusterError
from muster.worker.integrations import accelerate as ours
from muster.worker.integrations.transformers import CommitCallback, latest
from tests.support.jobs.fault import FAULTY, SAVES, Fault
from tests.support.jobs.job import Arguments, Job, say, say_failed

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


def break_save(sharding: str, fault: Fault) -> None:
    """Let a fault strike while the next shard is written, or after that."""
    if sharding == "deepspeed":
        fault.strike_in(torch, "save")
    else:
        fault.strike_in(filesystem.FileSystemWriter, "_write_data")


class AccelerateJob(Job):
    """Trains by hand."""

    FAILURES = (MusterError,)

    def __init__(self, given: Arguments, sharding: str) -> None:
        super().__init__(given)
        self._sharding = sharding
        options: dict[str, Any] = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}
        if sharding == "deepspeed":
            options = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=ZERO)}
        project = ProjectConfiguration(str(given.folder), automatic_checkpoint_naming=True, total_limit=2)
        self._accelerator: Any = ours.commit_together(Accelerator(project_config=project, **options))
        model: Any = Model()
        self._model, self._optimizer = self._accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), 1.0, weight_decay=0.0)
        )

    def has_checkpoint(self) -> bool:
        return ours.latest(self.given.folder) is not None

    def load(self) -> Sequence[object]:
        self._accelerator.load_state()
        steps = steps_in(self._model, self._optimizer)
        self.step = steps[0]
        return steps

    def train(self) -> None:
        self._accelerator.backward(self._model(torch.ones(1, 8))["loss"])
        self._optimizer.step()
        self._optimizer.zero_grad()

    def save(self) -> None:
        self._accelerator.save_state()

    def break_save(self, fault: Fault) -> None:
        break_save(self._sharding, fault)


class Teller(TrainerCallback):  # type: ignore[misc]
    """Prints a line for each step that was saved."""

    def __init__(self, given: Arguments, sharding: str) -> None:
        self.given = given
        self.sharding = sharding

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step:
            say("resumed", *steps_in(given["model"], given["optimizer"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == FAULTY and (fault := self.given.take_fault()):
            break_save(self.sharding, fault)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        say("saved", state.global_step)


def with_trainer(given: Arguments, sharding: str) -> None:
    """Let Transformers train."""
    options: dict[str, Any] = {
        "fsdp": True,
        "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT", "transformer_layer_cls_to_wrap": "Linear"},
    }
    if sharding == "deepspeed":
        options = {"deepspeed": ZERO}
    arguments = TrainingArguments(
        output_dir=str(given.folder),
        max_steps=SAVES if (last := latest(given.folder)) is None else int(last.name.split("-")[1]) + SAVES,
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
    teller = Teller(given, sharding)
    trainer = Trainer(Model(), arguments, train_dataset=data, callbacks=[CommitCallback(), teller])
    trainer.remove_callback(PrinterCallback)
    try:
        trainer.train(resume_from_checkpoint=last is not None)
    except MusterError as error:
        say_failed(trainer.state.global_step, error)
        raise


def main() -> None:
    """Resume, and train."""
    given = Arguments.read(own=2)
    kind, sharding = given.own
    torch.set_num_threads(1)
    pretend()
    if sharding == "deepspeed" and kind == "accelerate":
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    if kind == "accelerate":
        AccelerateJob(given, sharding).run()
    else:
        with_trainer(given, sharding)


if __name__ == "__main__":
    main()
