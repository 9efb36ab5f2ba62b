"""One rank of the job of :mod:`tests.support.chaos.local_torchrun_chaos`.

It resumes, trains, and saves to its node. What it sees goes at once to a history and to the test.
"""

import os
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
from tests.support.chaos.noted_saves import NotedSaves, Notes, are_told_to_finish, leave_trace
from tests.support.saves.save_history import STRIDE, weight_at

SAVE_EVERY = 4
COPIED_EVERY = 3
"""Every so many saves, one is finalized only when it has its copies."""
PACE = 0.02
"""Seconds of a step."""
MAX_IN_FLIGHT = 2


class Rank:
    """The training of one rank.

    Args:
        folder: the folder that all ranks share; each node's disk is a folder of it.
        replicas: the copies of each part.
    """

    def __init__(self, folder: Path, replicas: int) -> None:
        self._notes = Notes(folder)
        self._folder = folder
        self._disk = folder / os.environ["MUSTER_NODE_NAME"]
        self._saver = Checkpointer(
            folder / "shared",
            local=self._disk,
            replicas=replicas,
            persist_every=10,
            barrier=GrpcBarrier(barrier_prefix="save"),
        )
        self._saves = NotedSaves(self._saver, self._notes)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._weight = distribute_tensor(weight_at(0), mesh, [Shard(0)])
        self._saved_round = distribute_tensor(torch.zeros(dist.get_world_size()), mesh, [Shard(0)])
        """On each rank: the round in which it was saved, so that attempts at one step can be told apart."""

    def train(self) -> None:
        """Train from the newest checkpoint on, until all are told to finish."""
        step = self._resume()
        while not are_told_to_finish(self._folder):
            step += 1
            time.sleep(PACE)
            self._weight.to_local().add_(STRIDE)
            if step % SAVE_EVERY == 0:
                self._save(step)
            self._saves.listen(blocking=self._saves.in_flight >= MAX_IN_FLIGHT)
        self._saves.listen(blocking=True)
        self._saver.close()

    def _resume(self) -> int:
        found = self._saver.resume(self._state())
        step = 0 if found is None else found.step
        rows = weight_at(step).chunk(dist.get_world_size())[dist.get_rank()]
        if not torch.equal(self._weight.to_local(), rows):
            self._notes.add("wrong", step, text="not all bits are those that were saved")
        is_local = found is None or Path(found.path).is_relative_to(self._disk)
        saved_round = int(self._saved_round.to_local().item())
        self._notes.add("resumed", step, str(saved_round), "local" if is_local else "shared")
        self._saved_round.to_local().fill_(int(os.environ["MUSTER_ROUND"]))
        return step

    def _state(self) -> dict[str, Any]:
        return {"weight": self._weight, "saved_round": self._saved_round}

    def _save(self, step: int) -> None:
        wait_for: Any = "local" if step // SAVE_EVERY % COPIED_EVERY else "replicated"
        self._notes.add("scheduled", step)
        self._saver.save(step, self._state(), wait_for=wait_for)
        self._saves.begin(step, wait_for)


def main() -> None:
    """Be a worker of torchrun: ``FOLDER REPLICAS``."""
    folder, replicas = Path(sys.argv[1]), int(sys.argv[2])
    leave_trace(folder)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    Rank(folder, replicas).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
