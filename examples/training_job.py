r"""A small training job as users write it: one rank of data-parallel training that checkpoints.

Its ranks teach a recurrent network to write the licence text of this repository. Every few steps each
rank saves its part through torch's own checkpointer, and Muster's ``grpc`` barrier decides whether the
checkpoint is one: only after a release does rank 0 give the folder its final name. A rank that hears
that the barrier failed ends, and torchrun starts the job again in a new round. Start it on every node with

    torchrun --rdzv-backend=muster --rdzv-endpoint=HOST:7550 --rdzv-id=job1 --nnodes=4 \
        examples/training_job.py FOLDER
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._experimental.builder import make_sync_checkpointer
from torch.distributed.checkpoint._experimental.checkpoint_writer import WriterHook
from torch.distributed.checkpoint._experimental.config import CheckpointerConfig
from torch.distributed.checkpoint._experimental.types import RankInfo

from muster.worker.barriers import BarrierConfig

TEXT = Path(__file__).resolve().parent.parent / "LICENSE"
CONTEXT = 48
BATCH = 16
SAVE_EVERY = 20
UNCOMMITTED = ".uncommitted"


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


class Commit(WriterHook):
    """Gives a checkpoint its final name once the barrier has been released."""

    def __init__(self, rank: int, before_barrier: Callable[[str], None]) -> None:
        self._rank = rank
        self._before_barrier = before_barrier

    def pre_commit(self, path: str, **_: object) -> None:
        """This rank's part is written; the barrier comes next."""
        self._before_barrier(path)

    def post_commit(self, path: str, **_: object) -> None:
        """Every rank's part is written: all of them were released."""
        if self._rank == 0:
            Path(path).rename(path.removesuffix(UNCOMMITTED))


def latest(folder: Path) -> tuple[int, Path] | None:
    """The last committed checkpoint, with its step."""
    names = [p.name for p in folder.glob("step-*") if p.suffix != UNCOMMITTED]
    steps = [int(name.removeprefix("step-")) for name in names]
    return (max(steps), folder / f"step-{max(steps)}") if steps else None


def train(
    folder: Path,
    steps: int,
    before_barrier: Callable[[int], None] = lambda step: None,
    report: Callable[[str], None] = print,
) -> float:
    """Train this rank to the end, from the last committed checkpoint if there is one.

    Args:
        folder: where the checkpoints go; all ranks share it.
        steps: after how many to end.
        before_barrier: called with the step when this rank's part is written.
        report: told what happens, in words.

    Returns:
        The loss of the last step.

    Raises:
        torch.distributed.DistStoreError: a checkpoint was not committed, for any rank.
    """
    torch.manual_seed(7)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    text = TEXT.read_text()
    alphabet = sorted(set(text))
    data = torch.tensor([alphabet.index(character) for character in text])
    model = Writer(len(alphabet))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    checkpointer = make_sync_checkpointer(
        # Coordinator, run, rank, world size and round come from torchrun's environment.
        CheckpointerConfig(barrier_config=BarrierConfig("grpc", {"barrier_prefix": "checkpoint"})),
        RankInfo(global_world_size=world_size, global_rank=rank),
        Commit(rank, lambda path: before_barrier(int(Path(path).stem.removeprefix("step-")))),
    )
    start = 0
    committed = latest(folder)
    if committed is not None:
        start, path = committed
        state = checkpointer.load(str(path))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if rank == 0:
            report(f"rank {rank} resumes from {path.name}, the last checkpoint that was committed")
    loss = 0.0
    for step in range(start + 1, steps + 1):
        loss = _step(model, optimizer, data, step)
        if step % SAVE_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            checkpointer.save(str(folder / f"step-{step}{UNCOMMITTED}"), state)
            if rank == 0:
                report(f"step {step:3}: loss {loss:.2f}; the checkpoint is committed")
    checkpointer.close()
    dist.destroy_process_group()
    return loss


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor, step: int) -> float:
    """One step on this rank's own batch; gradients are averaged over all ranks."""
    draw = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=draw)
    windows = torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()])
    scores = model(windows[:, :-1])
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        assert parameter.grad is not None
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of a small training job; start it by torchrun.")
    parser.add_argument("folder", type=Path, help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    loss = train(arguments.folder, arguments.steps)
    print(f"rank {os.environ['RANK']} ends with loss {loss:.2f}")


if __name__ == "__main__":
    main()
