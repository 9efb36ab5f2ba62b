"""A rank of a job that trains with Accelerate: the arguments of :mod:`.job`.

The weight is the number of the step that made it. One checkpoint is kept. A rank whose save failed goes on
from the last checkpoint.
"""

import os
from collections.abc import Sequence
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # Else accelerate says what it has found, where it finds DeepSpeed.

import torch
from accelerate import Accelerator
from accelerate import accelerator as place
from accelerate.utils import ProjectConfiguration

from muster.worker.integrations.accelerate import commit_together
from muster.worker.integrations.commit.numbered import numbered
from tests.support.jobs.fault import SAVES, Fault
from tests.support.jobs.job import Arguments, Job, say
from tests.support.jobs.transformers_job import chance_at


class AccelerateJob(Job):
    """Saves a weight, and each rank's random numbers."""

    def __init__(self, given: Arguments) -> None:
        super().__init__(given)
        self._checkpoints = given.folder / "checkpoints"
        project = ProjectConfiguration(str(given.folder), automatic_checkpoint_naming=True, total_limit=1)
        accelerator: Any = Accelerator(cpu=True, project_config=project)
        self._accelerator = accelerator if given.is_plain else commit_together(accelerator)
        self._model = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(self._model.weight)
        self._accelerator.prepare(self._model)

    def has_checkpoint(self) -> bool:
        is_there = self.given.is_plain or bool(numbered(self._checkpoints, "checkpoint_"))
        return super().has_checkpoint() and is_there

    def load(self) -> Sequence[object]:
        self._accelerator.load_state()
        self.step = int(self._model.weight.item())
        self._accelerator.project_configuration.iteration = self.step
        return [self.step, self._whole()]

    def _whole(self) -> str:
        """Whether each rank's part of the checkpoint is there, and of its step."""
        for rank in range(self.given.world_size):
            part = self._checkpoints / f"checkpoint_{self.step - 1}" / f"random_states_{rank}.pkl"
            if not part.exists():
                return "torn"
            found = torch.load(part, weights_only=False)["torch_manual_seed"]
            if not torch.equal(found, chance_at(self.step, rank)):
                return "mixed"
        return "whole"

    def last_step(self) -> int:
        return self.given.saves if self.given.mode == "endless" else SAVES * (1 + self.given.generation)

    def train(self) -> None:
        torch.nn.init.constant_(self._model.weight, self.step)
        torch.random.set_rng_state(chance_at(self.step, self.given.rank))

    def save(self) -> None:
        self._accelerator.save_state()

    def break_save(self, fault: Fault) -> None:
        fault.strike_in(place, "save_accelerator_state")

    def after_failure(self, error: BaseException) -> None:
        self.resume()

    def close(self) -> None:
        say("ended", self.step)


if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    torch.set_num_threads(1)
    AccelerateJob(Arguments.read()).run()
