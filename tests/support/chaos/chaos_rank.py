"""One rank of the job of :mod:`tests.support.chaos.save_chaos`.

It trains, saves every other step, resumes from the last checkpoint, and writes down what it sees at once: in
a history of its own, for the judge, and in a pipe that all ranks share, by which the test injects its faults.
"""

import faulthandler
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from muster.worker import AsyncSaveError, Checkpointer, GrpcBarrier
from muster.worker.saves.writers.callers import ForkCaller
from tests.support.saves.file_saver import BlindCaller, FileSaver
from tests.support.saves.save_history import STRIDE, Event, extras_at, to_line, weight_at

SAVE_EVERY = 2
MOST_IN_FLIGHT = 3


class Notes:
    """What this rank sees, where a SIGKILL does not undo it."""

    def __init__(self, folder: Path) -> None:
        self._rank, self._round = int(os.environ["RANK"]), int(os.environ["MUSTER_ROUND"])
        history = folder / f"history-{self._round:04}-{self._rank}"
        self._files = (
            os.open(history, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
            os.open(folder / "events", os.O_WRONLY),
        )

    def add(self, what: str, step: int, path: Path | str = "", text: str = "") -> None:
        """Write an event down."""
        line = to_line(Event(self._rank, what, step, str(path), self._round, text)).encode()
        for file in self._files:
            os.write(file, line)


class Rank:
    """The training of one rank.

    Args:
        folder: what all ranks share.
        place: where the checkpoints go.
        kind: ``checkpointer``; ``files``: one file of each rank, with the queue alone; ``blind``: the same,
            with a caller that ignores how children end.
        pause: seconds that each of its steps takes at least.
        device: where the state is, ``cpu`` or ``cuda``.
    """

    def __init__(self, folder: Path, place: str, kind: str, pause: float, device: str) -> None:
        self._pause = pause
        self._device = device
        self._notes = Notes(folder)
        self._finish = folder / "finish"
        barrier = GrpcBarrier(barrier_prefix="save")
        self._saver: Any = (
            Checkpointer(place, barrier=barrier)
            if kind == "checkpointer"
            else FileSaver(Path(place), barrier, BlindCaller() if kind == "blind" else ForkCaller())
        )
        self._steps: list[int] = []
        """By the number of the save."""
        self._heard = 0
        if device == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]  # Else the mesh takes a GPU for each rank.
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        self._weight = distribute_tensor(weight_at(0), mesh, [Shard(0)])

    def train(self) -> None:
        """From the last checkpoint on, until all are told to finish."""
        step = self._resume()
        try:
            step = self._train_on(step)
        finally:
            # If others are gone, so is the training; what became of the saves is still to be known.
            self._listen(blocking=True)
        self._saver.close()
        self._notes.add("closed", step)

    def _train_on(self, step: int) -> int:
        while not self._finished():
            step += 1
            time.sleep(self._pause)
            self._weight.to_local().add_(STRIDE)
            if step % SAVE_EVERY == 0:
                self._saver.save(step, self._state_at(step))
                self._steps.append(step)
                self._notes.add("scheduled", step)
            self._listen(blocking=len(self._steps) - self._heard >= MOST_IN_FLIGHT)
        return step

    def _resume(self) -> int:
        latest = self._saver.latest()
        if latest is None:
            self._notes.add("loaded", 0)
            return 0
        state = self._state_at(latest.step)
        found = self._saver.load(state)
        self._notes.add("loaded", found.step, found.path)
        # Without a collective: gloo has no all_gather of a mesh's tensors on a GPU.
        rows = weight_at(found.step).chunk(dist.get_world_size())[dist.get_rank()]
        loaded = self._weight.to_local().cpu()
        assert torch.equal(loaded, rows), f"step {found.step} was not loaded as it was saved"
        return int(found.step)

    def _state_at(self, step: int) -> dict[str, Any]:
        extras = extras_at(step, dist.get_rank())
        on_device = {key: value.to(self._device) for key, value in extras.items()}
        return {"weight": self._weight, "step": step, **on_device}

    def _finished(self) -> bool:
        """What makes this a job of many ranks: if one is gone, the others cannot train on."""
        wish = torch.tensor([int(self._finish.exists())])
        dist.all_reduce(wish, dist.ReduceOp.MAX)
        return bool(wish)

    def _listen(self, blocking: bool) -> None:
        """Write down what there is to be known of the saves."""
        news = self._heard
        while True:
            try:
                done = len(self._saver.finalize(blocking))
            except AsyncSaveError as error:
                # It also ends those before it that the same call has finalized.
                self._hear("finalized", error.call_idx - self._heard)
                self._hear("failed", 1, str(error))
                continue
            self._hear("finalized", done)
            break
        if self._heard > news and (latest := self._saver.latest()) is not None:
            self._notes.add("latest", latest.step, latest.path)

    def _hear(self, what: str, count: int, text: str = "") -> None:
        for step in self._steps[self._heard : self._heard + count]:
            self._notes.add(what, step, text=text[:500])
        self._heard += count


def main() -> None:
    folder, place, kind, device = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    pause = float(sys.argv[5]) if len(sys.argv) > 5 else 0.0
    born = folder / f"born-{os.getpid()}"
    born.write_text(
        f"{os.environ['MUSTER_ROUND']} {os.environ['RANK']} {os.environ['WORLD_SIZE']} {os.getppid()}"
    )
    # Its children have the handler and the file, too.
    with (folder / f"stacks-{os.getpid()}").open("a") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        born.rename(folder / f"worker-{os.getpid()}")
        _train(folder, place, kind, device, pause)


def _train(folder: Path, place: str, kind: str, device: str, pause: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    Rank(folder, place, kind, pause, device).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
