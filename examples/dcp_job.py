r"""A small training job that is sharded over its ranks, and saves with ``torch.distributed.checkpoint``.

Its checkpoints are committed by all ranks or by none. Kill a rank of it while it runs: torchrun starts the
ranks again, and all go on from the same step. Start it on every node with

    torchrun --rdzv-backend=muster --rdzv-endpoint=HOST:7550 --rdzv-id=job1 --nnodes=4 --max-restarts=3 \
        examples/dcp_job.py FOLDER
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from muster.worker.integrations.checkpoint import (
    CommittedReader,
    CommittedWriter,
    agreed_latest,
    rotate,
)

SAVE_EVERY = 50
KEEP = 2


class Job:
    """One rank's part of a network, and of what its optimizer knows.

    Args:
        folder: where the checkpoints go; all ranks share it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step = 0
        torch.manual_seed(7)  # The same network on all ranks,
        self._model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
        fully_shard(self._model)
        torch.manual_seed(dist.get_rank())  # and other numbers to learn from.
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)

    def train(self) -> float:
        """Learn a batch: the sine of the sum of eight numbers. Returns the loss."""
        self.step += 1
        numbers = torch.randn(32, 8)
        loss = nn.functional.mse_loss(self._model(numbers), numbers.sum(dim=1, keepdim=True).sin())
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.item()

    def save(self) -> None:
        """Save, all ranks or none, and keep the last checkpoints."""
        path = self.folder / f"step-{self.step}"
        dcp.save(self._state(), storage_writer=CommittedWriter(path))
        if dist.get_rank() == 0:
            # In the order of commits: damaged ones do not count, and those that people have marked stay.
            rotate(self.folder, "step-", KEEP, {path})

    def resume(self) -> None:
        """Go on from the last checkpoint, if there is one."""
        if (last := agreed_latest(self.folder)) is None:
            return
        state = self._state()
        dcp.load(state, storage_reader=CommittedReader(last))
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of a small training job; start it by torchrun.")
    parser.add_argument("folder", type=Path, help="where the checkpoints go; all ranks share it")
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    job = Job(arguments.folder)
    job.resume()  # Coordinator, run and round come from torchrun's environment.
    if job.step:
        print(f"rank {dist.get_rank()} goes on from step {job.step}", flush=True)
    while job.step < arguments.steps:
        loss = job.train()
        if job.step % SAVE_EVERY == 0:
            try:
                job.save()
            except (
                dcp.CheckpointException
            ) as error:  # On every rank, and all are there: the next may succeed.
                print(f"rank {dist.get_rank()}, step {job.step}: {error}", flush=True)
            else:
                print(f"rank {dist.get_rank()}, step {job.step}: committed, loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
