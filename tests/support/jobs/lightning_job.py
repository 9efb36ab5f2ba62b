"""A rank of a job that Lightning trains: the arguments of :mod:`.job`, OWN: ``KIND``.

KIND is ``ddp``, ``fsdp`` or ``model_parallel``. The weights are the number of the step that made them. Each
step is saved under the same name. A rank finds no checkpoint if FOLDER has ``unmounted-RANK``.
"""

import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.plugins.io import torch_io
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.fsdp import fully_shard, fully_sharded_data_parallel
from torch.utils.data import DataLoader, TensorDataset

from muster.worker.errors import MemberLostError
from muster.worker.integrations.lightning import committed
from tests.support.jobs.fault import FAULTY, Fault
from tests.support.jobs.job import Arguments, say, say_failed

GLOO: dict[str, Any] = {"process_group_backend": "gloo", "timeout": timedelta(seconds=20)}


def strategy_of(kind: str) -> Any:
    """Lightning's own."""
    if kind == "ddp":
        return DDPStrategy(**GLOO)
    if kind == "model_parallel":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, **GLOO)
    # Torch's refuses to work without a GPU, though it can.
    place: Any = fully_sharded_data_parallel
    theirs = place._init_device_handle
    place._init_device_handle = lambda state, module, ignored, _: theirs(
        state, module, ignored, torch.device("cpu")
    )
    return FSDPStrategy(state_dict_type="sharded", **GLOO)


class Model(LightningModule):  # type: ignore[misc]
    """Its weights grow by one with each step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = torch.nn.Linear(8, 8, bias=False)
        torch.nn.init.zeros_(self.layer.weight)

    def configure_model(self) -> None:
        if self.kind == "model_parallel":
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        out: torch.Tensor = self.layer(torch.ones(1, 8))
        return -out.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.trainer.model.parameters(), lr=1.0)

    def weight(self) -> int:
        """The step that made this rank's part of the weights."""
        own = next(iter(self.trainer.model.parameters()))
        own = own.to_local() if hasattr(own, "to_local") else own
        return round(float(own.detach().flatten()[0]))


class Saving(Callback):  # type: ignore[misc]
    """Saves each step, and prints a line of it."""

    def __init__(self, path: Path, given: Arguments) -> None:
        self.path = path
        self.given = given
        self.saves = 0

    def on_train_start(self, trainer: Trainer, module: Model) -> None:
        if trainer.ckpt_path is not None:
            say("resumed", module.weight(), trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, module: Model, *_: object) -> None:
        step = trainer.global_step
        self.saves += 1
        trainer.should_stop = self.saves == self.given.saves
        if step == FAULTY:
            trainer.strategy.barrier()  # All have trained the step.
            if fault := self.given.take_fault():
                self.break_save(module.kind, fault)
        try:
            trainer.save_checkpoint(self.path)
        except (Exception, CheckpointException) as error:  # Torch's is no Exception.
            say_failed(step, error)
            if isinstance(error, MemberLostError):
                raise
        else:
            say("saved", step)

    def break_save(self, kind: str, fault: Fault) -> None:
        """Let a fault strike before the save, or in it."""
        if fault.when == "before":
            fault.strike()
        elif kind == "ddp":
            fault.strike_in(torch_io, "_atomic_save")
        else:
            fault.strike_in(FileSystemWriter, "_write_data")


def main() -> None:
    """Train and save."""
    given = Arguments.read(own=1)
    (kind,) = given.own
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    strategy = strategy_of(kind)
    # As torchrun starts a rank: Lightning shall start none.
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    os.environ |= {"GROUP_RANK": "0"}
    path = given.folder / "last.ckpt"
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy if given.is_plain else committed(strategy),
        plugins=[TorchElasticEnvironment()],
        callbacks=[Saving(path, given)],
        max_epochs=1000,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    sees = not (given.folder / f"unmounted-{given.rank}").exists()
    trainer.fit(
        Model(kind),
        DataLoader(TensorDataset(torch.ones(1000, 1))),
        ckpt_path=path if given.generation and sees else None,
    )


if __name__ == "__main__":
    main()
