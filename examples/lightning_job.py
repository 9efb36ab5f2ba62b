r"""A small training job of Lightning whose checkpoints are committed by all ranks or by none.

It fits a small network to a function. If a rank is killed, also while it saves, torchrun starts a new round,
which goes on from the last checkpoint that was committed. Start it on every node with

    torchrun --rdzv-backend=muster --rdzv-endpoint=HOST:7550 --rdzv-id=job1 --nnodes=4 --max-restarts=3 \
        examples/lightning_job.py FOLDER
"""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import muster.worker.integrations.lightning  # Registers the strategies' names.  # noqa: F401


class Fit(LightningModule):  # type: ignore[misc]
    """Learns the sine of the sum of eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        """The loss of a batch."""
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[0].sum(dim=1, keepdim=True).sin())
        if self.trainer.global_step % 50 == 0:
            self.print(f"step {self.trainer.global_step}: loss {loss:.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    """Train this rank, from the last checkpoint if there is one."""
    data = DataLoader(TensorDataset(torch.randn(6400, 8)), batch_size=32)
    trainer = Trainer(
        strategy="committed_ddp",
        devices="auto" if torch.cuda.is_available() else 2,
        callbacks=[ModelCheckpoint(sys.argv[1], save_last=True, every_n_train_steps=50)],
        max_epochs=10,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Fit(), data, ckpt_path="last")


if __name__ == "__main__":
    main()
