"""Strategies that commit, in one process and without a trainer."""

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy

from muster.worker.integrations.lightning import committed
from tests.support.jobs import alone


class Alone(alone.Alone):
    """The barrier of a job of one rank."""

    prefix = "checkpoint/lightning"


def ddp(**options: Any) -> Any:
    where = {"parallel_devices": [torch.device("cpu")], "cluster_environment": LightningEnvironment()}
    return committed(DDPStrategy(**where), **options)


class Sharded(FSDPStrategy):  # type: ignore[misc]
    """Writes folders, as Lightning's does, but for torch's part."""

    def __init__(self) -> None:
        super().__init__(parallel_devices=[torch.device("cpu")], cluster_environment=LightningEnvironment())
        self.step = 0

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Path, storage_options: Any = None
    ) -> None:
        filepath.mkdir()
        (filepath / "__0_0.distcp").write_text("a shard")
        torch.save(checkpoint, filepath / "rest")

    def load_checkpoint(self, checkpoint_path: Path, weights_only: bool | None = None) -> dict[str, Any]:
        loaded: dict[str, Any] = torch.load(checkpoint_path / "rest", weights_only=True)
        return loaded

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj


def fully_sharded() -> Any:
    return committed(Sharded())


def state(step: int) -> dict[str, Any]:
    return {"global_step": step, "state_dict": {"weights": torch.full((10,), float(step))}}


MADE = [ddp, fully_sharded]
