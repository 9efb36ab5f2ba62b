"""A rank that a script spawns by itself: no launcher says which one it is, and its process group knows."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from muster.worker.integrations.checkpoint import CommittedReader, CommittedWriter
from muster.worker.saves import Checkpointer
from tests.support.saves.save_history import weight_at

STEP = 7


def save_and_load(rank: int, world_size: int, folder: str) -> None:
    """Save one step together with the other ranks, and load it; by a ``Checkpointer`` and by ``dcp.save``.

    Args:
        rank: this process's.
        world_size: the number of ranks.
        folder: where the checkpoints go, and where the process group meets.
    """
    torch.set_num_threads(1)
    place = Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=world_size)
    made = Checkpointer(place / "steps", timeout=60)
    made.save(STEP, _state(STEP))
    assert made.finalize(blocking=True) == [STEP]
    into = _state(0)
    found = made.resume(into)
    assert found is not None
    assert (found.step, found.world_size) == (STEP, world_size)
    _check(into)
    made.close()
    dcp.save(_state(STEP), storage_writer=CommittedWriter(place / "last", timeout=60))
    into = _state(0)
    dcp.load(into, storage_reader=CommittedReader(place / "last"))
    _check(into)
    dist.destroy_process_group()


def _state(step: int) -> dict[str, Any]:
    """Return this rank's shard of a weight, and the step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"weight": distribute_tensor(weight_at(step), mesh, [Shard(0)]), "step": step}


def _check(state: dict[str, Any]) -> None:
    assert state["step"] == STEP
    assert torch.equal(state["weight"].full_tensor(), weight_at(STEP))
