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

from muster.worker import Checkpointer, GrpcBarrier
from muster.worker.saves.writers.callers import ForkCaller
from tests.support.chaos.noted_saves import NotedSaves, Notes, are_told_to_finish, leave_trace
from tests.support.saves.file_saver import BlindCaller, FileSaver
from tests.support.saves.save_history import STRIDE, extras_at, weight_at

SAVE_EVERY = 2
MAX_IN_FLIGHT = 3


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
        self._folder = folder
        barrier = GrpcBarrier(barrier_prefix="save")
        self._saver: Any = (
            Checkpointer(place, barrier=barrier)
            if kind == "checkpointer"
            else FileSaver(Path(place), barrier, BlindCaller() if kind == "blind" else ForkCaller())
        )
        self._saves = NotedSaves(self._saver, self._notes)
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
        while not are_told_to_finish(self._folder):
            step += 1
            time.sleep(self._pause)
            self._weight.to_local().add_(STRIDE)
            if step % SAVE_EVERY == 0:
                self._saver.save(step, self._state_at(step))
                self._saves.begin(step)
                self._notes.add("scheduled", step)
            self._listen(blocking=self._saves.in_flight >= MAX_IN_FLIGHT)
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

    def _listen(self, blocking: bool) -> None:
        """Write down what there is to be known of the saves."""
        if self._saves.listen(blocking) and (latest := self._saver.latest()) is not None:
            self._notes.add("latest", latest.step, latest.path)


def main() -> None:
    folder, place, kind, device = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    pause = float(sys.argv[5]) if len(sys.argv) > 5 else 0.0
    # Its children have the handler and the file, too.
    with (folder / f"stacks-{os.getpid()}").open("a") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        leave_trace(folder)
        _train(folder, place, kind, device, pause)


def _train(folder: Path, place: str, kind: str, device: str, pause: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    Rank(folder, place, kind, pause, device).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
