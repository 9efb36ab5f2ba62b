"""A rank of a job that checkpoints by torchtitan's manager: ``FOLDER MODE [WHO WHAT WHEN]``.

MODE is ``committed`` or ``plain``: with Muster's manager, or with torchtitan's own, the control; or
``endless``: committed and asynchronous, until it is killed. With ``-back``, all ranks go back to the step
before the last, and train on other data. With ``-hf``, the last save is in safetensors. With ``-from``, the
job names the last step's checkpoint as the one to load. The model is sharded; its weights are the number of
the step, and of the data. Each step is saved, and two checkpoints are kept. Every life of the job but the
first resumes. At the third save rank WHO does WHAT (``kill``, ``raise``) at WHEN: ``before`` the save,
``writing``, or ``after`` it has written.
"""

import logging
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import TRAIN_STATE, CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from muster.worker import MusterError
from muster.worker.integrations.torchtitan import CommittedCheckpointManager
from tests.support.jobs.fault import ENDLESS, FAULTY, strike

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


class Job:
    """The parts that torchtitan's trainer has."""

    def __init__(self, folder: Path, kind: type[CheckpointManager], async_mode: str, how: str) -> None:
        self.model = torch.nn.Linear(1, dist.get_world_size(), bias=False)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.progress = Progress()
        group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.0})
        optimizers = OptimizersContainer.Config(param_groups=[group]).build(model_parts=[self.model])
        self.manager: Any = kind.Config(
            enable=True,
            interval=1,
            keep_latest_k=2,
            async_mode=async_mode,
            initial_load_path=str(folder / f"checkpoint/step-{FAULTY}") if how == "from" else None,
            initial_load_model_only=False,
            last_save_model_only=how == "hf",
            last_save_in_hf=how == "hf",
        ).build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=optimizers,
            lr_schedulers=LRSchedulersContainer.Config().build(optimizers=optimizers, training_steps=1),
            states={TRAIN_STATE: self.progress},
            sd_adapter=ToHuggingFace(),
            base_folder=str(folder),
        )

    @property
    def weights(self) -> torch.Tensor:
        """This rank's part of them."""
        weight: Any = self.model.weight
        local: torch.Tensor = weight.to_local()
        return local

    def resume(self, step: int) -> None:
        """Load a step, and say what it holds."""
        if self.manager.load(step):
            expected = self.progress.step + self.progress.data
            whole = set(self.weights.flatten().tolist()) == {float(expected)}
            print("resumed", self.progress.step, "whole" if whole else "mixed", flush=True)

    def train(self) -> None:
        """One step."""
        self.progress.step += 1
        with torch.no_grad():
            self.weights.fill_(self.progress.step + self.progress.data)

    def save(self, last: bool) -> None:
        """Save, and say what has come of it."""
        try:
            self.manager.save(self.progress.step, last_step=last)
            self.manager.maybe_wait_for_saving()
        except (CheckpointException, MusterError) as error:
            print("failed", self.progress.step, *str(error).split(), flush=True)
            raise  # As torchtitan's trainer does.
        else:
            print("saved", self.progress.step, flush=True)


def doom(what: str, when: str) -> None:
    """Let the next write go wrong."""
    writers: Any = FileSystemWriter
    theirs = writers._write_data

    def ours(*arguments: Any) -> Any:
        writers._write_data = theirs
        written = theirs(*arguments) if when == "after" else None
        strike(what)
        return written

    writers._write_data = ours


def main() -> None:
    """Resume, train and save; print a line of each."""
    folder, (mode, _, how) = Path(sys.argv[1]), sys.argv[2].partition("-")
    who, what, when = sys.argv[3:] or ("none", "", "")
    rank = os.environ["RANK"]
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    kind = CheckpointManager if mode == "plain" else CommittedCheckpointManager
    job = Job(folder, kind, "async" if mode == "endless" else "disabled", how)
    job.resume(FAULTY - 1 if how == "back" else -1)
    if how == "back":
        job.progress.data = OTHER_DATA
    first = job.progress.step
    while job.progress.step < (first + ENDLESS if mode == "endless" else FAULTY):
        job.train()
        if (job.progress.step, rank) == (FAULTY, who):
            if when == "before":
                strike(what)
            doom(what, when)
        job.save(last=how == "hf" and job.progress.step == FAULTY)
    job.manager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
