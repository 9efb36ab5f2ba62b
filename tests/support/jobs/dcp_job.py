"""A rank of a job that saves with ``torch.distributed.checkpoint``: the arguments of :mod:`.job`.

FOLDER is the checkpoint: each save is of the same name, and a step later. WHEN may also be ``planning``.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from muster.worker.integrations.checkpoint import CommittedReader, CommittedWriter
from tests.support.jobs.fault import Fault
from tests.support.jobs.job import Arguments, Job


class DcpJob(Job):
    """Saves a state of which each rank has a key of its own, and so writes a file."""

    FAILURES = (dcp.CheckpointException,)  # Torch's is no Exception; any other ends the job.

    def load(self) -> Sequence[object]:
        path = self.given.folder
        state = self._state_at(0)
        reader = FileSystemReader(path) if self.given.is_plain else CommittedReader(path)
        dcp.load(state, storage_reader=reader)
        (part,) = state.values()
        steps = sorted({int(weight) for weight in part})
        self.step = steps[0]
        return steps

    def train(self) -> None:
        path = self.given.folder
        self._writer = FileSystemWriter(path) if self.given.is_plain else CommittedWriter(path)

    def save(self) -> None:
        dcp.save(self._state_at(self.step), storage_writer=self._writer)

    def break_save(self, fault: Fault) -> None:
        fault.strike_in(self._writer, "prepare_local_plan" if fault.when == "planning" else "_write_data")

    def after_failure(self, error: BaseException) -> None:
        """Go on: the next save commits."""

    def _state_at(self, step: int) -> dict[str, torch.Tensor]:
        return {f"part-{self.given.rank}": torch.full((1000,), float(step))}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    DcpJob(Arguments.read()).run()
