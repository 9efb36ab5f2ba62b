r"""A small job of Accelerate whose checkpoints are committed by all ranks or by none.

It fits a small network to a function. If a rank is killed, also while it saves, torchrun starts a new round,
which goes on from the last checkpoint that was committed. Start it on every node with

    torchrun --rdzv-backend=muster --rdzv-endpoint=HOST:7550 --rdzv-id=job1 --nnodes=4 --max-restarts=3 \
        examples/accelerate_job.py FOLDER
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from muster.worker.errors import BarrierAbortedError
from muster.worker.integrations.accelerate import agreed_latest, commit_together


class Progress:
    """How far the training is; it is saved and loaded with the rest."""

    def __init__(self) -> None:
        self.epoch = 0

    def state_dict(self) -> dict[str, int]:
        """What is saved."""
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """What was saved."""
        self.epoch = state["epoch"]


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of a small training job; start it by torchrun.")
    parser.add_argument("folder", type=Path, help="where the checkpoints go; all ranks share it")
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()
    project = ProjectConfiguration(str(arguments.folder), automatic_checkpoint_naming=True, total_limit=2)
    # Without a GPU the ranks are not joined unless this is said.
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), project_config=project)
    commit_together(accelerator)  # Coordinator, run and round come from torchrun's environment.
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    numbers = torch.randn(3200, 8)
    data = DataLoader(TensorDataset(numbers, numbers.sum(dim=1, keepdim=True).sin()), 32, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), data)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if agreed_latest(arguments.folder) is not None:
        accelerator.load_state()
        print(f"rank {accelerator.process_index} goes on from epoch {progress.epoch}", flush=True)
    while progress.epoch < arguments.epochs:
        for given, wanted in data:
            loss = nn.functional.mse_loss(model(given), wanted)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        progress.epoch += 1
        try:
            accelerator.save_state()
        except BarrierAbortedError as error:  # On every rank, and all are there: the next may succeed.
            print(f"rank {accelerator.process_index}, epoch {progress.epoch}: {error}", flush=True)
        else:
            accelerator.print(f"epoch {progress.epoch}: committed, loss {loss.item():.4f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
