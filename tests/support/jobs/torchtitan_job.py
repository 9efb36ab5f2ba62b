"""A rank of a job that checkpoints by torchtitan's manager: the arguments of :mod:`.job`.

An ``endless`` one saves asynchronously. With ``-back`` after MODE, all ranks go back to the step before the
last, and train on other data. With ``-hf``, the last save is in safetensors. With ``-from``, the job names
the last step's checkpoint as the one to load. The model is sharded; its weights are the number of the step,
and of the data. Two checkpoints are kept. A generation ends at the third step.
"""

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import TRAIN_STATE, CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from muster.worker.errors import MusterError
from muster.worker.integrations.torchtitan import CommittedCheckpointManager
from tests.support.jobs.fault import FAULTY, Fault
from tests.support.jobs.job import Arguments, Job

OTHER_DATA = 1000
"""What is added to the weights by other data."""


class Progress:
    """What torchtitan's trainer saves of itself."""

    def __init__(self) -> None:
        self.step = 0
        self.data = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step), "data": torch.tensor(self.data)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.data = int(state["step"]), int(state["data"])


class ToHuggingFace:
    """Names of weights, as they are; all in one file."""

    def __init__(self) -> None:
        self.fqn_to_index_mapping = {"weight": 1}

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"weight": state["weight"]}


class TorchtitanJob(Job):
    """Has the parts that torchtitan's trainer has."""

    FAILURES = (CheckpointException, MusterError)  # Raised again, as torchtitan's trainer does.

    def __init__(self, given: Arguments) -> None:
        super().__init__(given)
        mode, _, self.how = given.mode.partition("-")
        self.model = torch.nn.Linear(1, dist.get_world_size(), bias=False)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.progress = Progress()
        group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.0})
        optimizers = OptimizersContainer.Config(param_groups=[group]).build(model_parts=[self.model])
        kind: Any = CheckpointManager if mode == "plain" else CommittedCheckpointManager
        self.manager = kind.Config(
            enable=True,
            interval=1,
            keep_latest_k=2,
            async_mode="async" if mode == "endless" else "disabled",
            initial_load_path=str(given.folder / f"checkpoint/step-{FAULTY}") if self.how == "from" else None,
            initial_load_model_only=False,
            last_save_model_only=self.how == "hf",
            last_save_in_hf=self.how == "hf",
        ).build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=optimizers,
            lr_schedulers=LRSchedulersContainer.Config().build(optimizers=optimizers, training_steps=1),
            states={TRAIN_STATE: self.progress},
            sd_adapter=ToHuggingFace(),
            base_folder=str(given.folder),
        )

    @property
    def weights(self) -> torch.Tensor:
        """This rank's part of them."""
        weight: Any = self.model.weight
        local: torch.Tensor = weight.to_local()
        return local

    def has_checkpoint(self) -> bool:
        return True  # The manager looks for itself.

    def load(self) -> Sequence[object]:
        if not self.manager.load(FAULTY - 1 if self.how == "back" else -1):
            return []
        self.step = self.progress.step
        expected = self.step + self.progress.data
        whole = set(self.weights.flatten().tolist()) == {float(expected)}
        if self.how == "back":
            self.progress.data = OTHER_DATA
        return [self.step, "whole" if whole else "mixed"]

    def last_step(self) -> int:
        return super().last_step() if self.given.mode == "endless" else FAULTY

    def train(self) -> None:
        self.progress.step = self.step
        with torch.no_grad():
            self.weights.fill_(self.step + self.progress.data)

    def save(self) -> None:
        self.manager.save(self.step, last_step=self.how == "hf" and self.step == FAULTY)
        self.manager.maybe_wait_for_saving()

    def break_save(self, fault: Fault) -> None:
        fault.strike_in(FileSystemWriter, "_write_data")

    def close(self) -> None:
        self.manager.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    TorchtitanJob(Arguments.read()).run()
