"""A rank whose saves are recorded: ``SAVER FOLDER``.

It says ``ready`` and stands still until it is told to go on. It makes a save of each step, and writes
``begins STEP`` and ``saved STEP`` to its marks, where the recording finds them.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from muster.worker.integrations.checkpoint import CommittedWriter
from muster.worker.saves import Checkpointer
from tests.support.crashes.power_loss import MARKS
from tests.support.saves.save_history import weight_at

STEPS = 3
RUN = "run"
"""The job's own folder, which is made when it begins."""
LAST = "last"
"""The name under which a ``CommittedWriter`` saves each step."""

Mark = Callable[[str, int], None]
"""Says what has become of a step."""


def state_at(step: int, rank: int, world_size: int) -> dict[str, Any]:
    """Return a rank's state at a step: a shard of a weight, and a tensor of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    return {
        "weight": distribute_tensor(weight_at(step), mesh, [Shard(0)]),
        f"own-{rank}": torch.full((1000,), float(step * 10 + rank)),
        "step": step,
    }


def checkpointer(folder: Path, rank: int, world_size: int, mark: Mark) -> None:
    """``Checkpointer``, of which two checkpoints are kept."""
    dist.init_process_group("gloo")
    (folder / RUN).mkdir(exist_ok=True)  # As scripts do; nobody puts it on the disk.
    made = Checkpointer(folder / RUN, keep_last=2, timeout=60)
    for step in range(1, STEPS + 1):
        mark("begins", step)
        made.save(step, state_at(step, rank, world_size))
        assert made.finalize(blocking=True) == [step]
        mark("saved", step)
    made.close()


def writer(folder: Path, rank: int, world_size: int, mark: Mark) -> None:
    """``dcp.save`` with a ``CommittedWriter``; each step replaces the one before."""
    dist.init_process_group("gloo")
    for step in range(1, STEPS + 1):
        mark("begins", step)
        dcp.save(
            state_at(step, rank, world_size), storage_writer=CommittedWriter(folder / RUN / LAST, timeout=60)
        )
        mark("saved", step)


def accelerate(folder: Path, rank: int, world_size: int, mark: Mark) -> None:
    """Accelerate's ``save_state``, with automatic names, of which two are kept."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from muster.worker.integrations.accelerate import commit_together

    project = ProjectConfiguration(str(folder / RUN), automatic_checkpoint_naming=True, total_limit=2)
    accelerator: Any = commit_together(Accelerator(cpu=True, project_config=project), timeout=60)
    model = torch.nn.Linear(1, 1)
    accelerator.prepare(model)
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            model.weight.fill_(step)
        torch.manual_seed(step * 10 + rank)
        mark("begins", step)
        accelerator.save_state()
        mark("saved", step)


def transformers(folder: Path, rank: int, world_size: int, mark: Mark) -> None:
    """A ``Trainer`` that saves at each step, and keeps two checkpoints."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    from muster.worker.integrations.transformers import CommitCallback
    from tests.support.jobs.transformers_job import Line

    class Marks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            mark("begins", state.global_step)

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            mark("saved", state.global_step)

    arguments = TrainingArguments(
        output_dir=str(folder / RUN),
        use_cpu=True,
        ddp_find_unused_parameters=False,
        max_steps=STEPS,
        per_device_train_batch_size=1,
        save_steps=1,
        save_total_limit=2,
        disable_tqdm=True,
        logging_strategy="no",
        report_to="none",
    )
    data = [{"x": torch.tensor([float(n)]), "labels": torch.tensor([2.0 * n])} for n in range(8)]
    trainer = Trainer(Line(), arguments, train_dataset=data, callbacks=[CommitCallback(), Marks()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()


SAVERS = {one.__name__: one for one in (checkpointer, writer, accelerate, transformers)}


def main() -> None:
    """Save."""
    saver, folder = sys.argv[1], Path(sys.argv[2])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    torch.set_num_threads(1)
    marks = os.open(f"{folder}-{rank}{MARKS}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def mark(what: str, step: int) -> None:
        os.write(marks, f"{what} {step}".encode())

    print("ready", flush=True)
    sys.stdin.readline()
    SAVERS[saver](folder, rank, world_size, mark)


if __name__ == "__main__":
    main()
