r"""A small training job as users write it: one rank of data-parallel training that saves while it trains.

Its ranks teach a recurrent network to write the licence text of this repository. Every few steps a child of
each rank writes the rank's part of a checkpoint, and training goes on meanwhile. If all children succeed, the
checkpoint is committed; if one does not, every rank is told which and why, and nothing is. A job that is
started again goes on from the last checkpoint that was committed. Start it on every node with

    torchrun --rdzv-backend=muster --rdzv-endpoint=HOST:7550 --rdzv-id=job1 --nnodes=4 --max-restarts=3 \
        examples/training_job.py FOLDER

With ``--local /nvme/muster`` its checkpoints are kept on the nodes' own disks, with copies on other nodes.
Each fourth goes to the folder, too.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from muster.worker import AsyncSaveError, Checkpointer

TEXT = Path(__file__).resolve().parent.parent / "LICENSE"
CONTEXT = 48
BATCH = 16
SAVE_EVERY = 50
REPORT_EVERY = 25

Report = Callable[[str, int, str], None]
"""Told what happened (``trained``, ``resumed``, ``committed``, ``failed``), at which step, and a text."""


class Writer(nn.Module):
    """Predicts the next character of a text."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, 48)
        self.recur = nn.GRU(48, 96, batch_first=True)
        self.predict = nn.Linear(96, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Scores of the next character: (batch, length, characters) for (batch, length)."""
        hidden, _ = self.recur(self.embed(text))
        scores: torch.Tensor = self.predict(hidden)
        return scores


def train(folder: Path, steps: int, report: Report, local: Path | None = None) -> float:
    """Train this rank to the end, from the last committed checkpoint if there is one.

    Args:
        folder: where the checkpoints go; all ranks share it.
        steps: after how many to end.
        report: told what happens.
        local: a folder on the node's own disk; None: the checkpoints go to ``folder`` alone.

    Returns:
        The loss of the last step.

    Raises:
        muster.worker.AsyncSaveError: the last saves were not committed, on any rank.
    """
    torch.manual_seed(7)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    text = TEXT.read_text()
    alphabet = sorted(set(text))
    data = torch.tensor([alphabet.index(character) for character in text])
    model = DistributedDataParallel(Writer(len(alphabet)))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)

    # Coordinator, run, rank, world size and round come from torchrun's environment.
    if local is None:
        checkpointer = Checkpointer(folder, keep_last=3)
    else:
        checkpointer = Checkpointer(folder, keep_last=3, local=local, replicas=1, persist_every=4)
    start, loss = 0, 0.0
    state = state_of(model, optimizer)
    if resumed := checkpointer.resume(state):
        start = resumed.step
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        report("resumed", start, "from the last checkpoint that was committed")
    try:
        for step in range(start + 1, steps + 1):
            loss = train_step(model, optimizer, data, step)
            if step % SAVE_EVERY == 0:
                checkpointer.save(step, state_of(model, optimizer))  # A child writes; training goes on.
            if step % REPORT_EVERY == 0:
                report("trained", step, f"loss {loss:.2f}")
            try:
                for saved in checkpointer.finalize():
                    report("committed", saved, "on every rank")
            except AsyncSaveError as error:  # On every rank. The next save is made as if nothing had been.
                report("failed", step, str(error))
        for saved in checkpointer.finalize(blocking=True):
            report("committed", saved, "on every rank")
    finally:
        checkpointer.close()  # If training broke off, this waits to say what became of the last saves.
    dist.destroy_process_group()
    return loss


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is saved."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor, step: int) -> float:
    """One step on this rank's own batch; gradients are averaged over all ranks."""
    draw = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=draw)
    windows = torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()])
    scores = model(windows[:, :-1])
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of a small training job; start it by torchrun.")
    parser.add_argument("folder", type=Path, help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--local", type=Path, help="a folder on the node's own disk")
    arguments = parser.parse_args()
    rank = os.environ["RANK"]
    loss = train(
        arguments.folder,
        arguments.steps,
        lambda what, step, text: print(f"rank {rank}, step {step}: {what} {text}", flush=True),
        arguments.local,
    )
    print(f"rank {rank} ends with loss {loss:.2f}")


if __name__ == "__main__":
    main()
