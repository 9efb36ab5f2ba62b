"""torch's own checkpointers save and load with our barrier, in real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.patience import PATIENCE, until
from lab.processes import fork_client
from lab.processes.coordinator import Coordinator

pytestmark = pytest.mark.also_through_relay

EXPERIMENTAL = """
import sys, torch
import muster.worker
from muster.worker.barriers import BarrierConfig
from torch.distributed.checkpoint._experimental.builder import make_sync_checkpointer
from torch.distributed.checkpoint._experimental.config import CheckpointerConfig
from torch.distributed.checkpoint._experimental.types import RankInfo

rank, world, folder, endpoint = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
arguments = dict(global_rank=rank, global_world_size=world, barrier_prefix="ckpt", endpoint=endpoint,
                 timeout_barrier_init_secs=60, timeout_secs=60, run_id="experimental")
config = CheckpointerConfig(barrier_config=BarrierConfig("grpc", arguments))
checkpointer = make_sync_checkpointer(config, RankInfo(global_world_size=world, global_rank=rank))
for step in range(3):
    checkpointer.save(f"{folder}/step-{step}", {"weight": torch.full((8,), float(10 * step + rank))})
loaded = checkpointer.load(f"{folder}/step-2")
assert torch.equal(loaded["weight"], torch.full((8,), float(20 + rank))), loaded
checkpointer.close()
print("loaded")
"""

ASYNC_EXPERIMENTAL = """
import sys, torch
import muster.worker
from muster.worker.barriers import BarrierConfig, create_barrier_from_config
from torch.distributed.checkpoint._experimental.builder import make_async_checkpointer
from torch.distributed.checkpoint._experimental.checkpoint_writer import (
    CheckpointWriter, CheckpointWriterConfig)
from torch.distributed.checkpoint._experimental.config import CheckpointerConfig
from torch.distributed.checkpoint._experimental.staging import CheckpointStagerConfig
from torch.distributed.checkpoint._experimental.types import RankInfo


def make_writer(rank_info, barrier_config):
    # The checkpoint process builds the barrier: it is the one that arrives.
    return CheckpointWriter(CheckpointWriterConfig(), rank_info,
                            barrier=create_barrier_from_config(barrier_config))


if __name__ == "__main__":
    rank, world, folder, endpoint = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    arguments = dict(global_rank=rank, global_world_size=world, barrier_prefix="ckpt",
                     endpoint=endpoint, timeout_barrier_init_secs=60, timeout_secs=60,
                     run_id="async-experimental")
    staging = CheckpointStagerConfig(
        use_pinned_memory=False, use_shared_memory=True, use_non_blocking_copy=False)
    checkpointer = make_async_checkpointer(
        CheckpointerConfig(staging_config=staging),
        rank_info=RankInfo(global_world_size=world, global_rank=rank),
        subprocess_init_fn=__import__("importlib").import_module,
        subprocess_init_args=("muster.worker",),
        checkpoint_writer_init_fn=make_writer,
        checkpoint_writer_init_args={"barrier_config": BarrierConfig("grpc", arguments)},
    )
    for step in range(2):
        stage, write = checkpointer.save(
            f"{folder}/step-{step}", {"weight": torch.full((8,), float(10 * step + rank))})
        write.result()
    loaded = checkpointer.load(f"{folder}/step-1")
    assert torch.equal(loaded["weight"], torch.full((8,), float(10 + rank))), loaded
    checkpointer.close()
    print("loaded")
"""


TORCH_CHECKPOINTING = """
import sys, torch
import torch.distributed as dist
from torch_checkpointing import CheckpointManager
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
from muster.worker import GrpcBarrierConfig

if __name__ == "__main__":
    rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{folder}-store", rank=rank, world_size=world)
    for kind in (SyncCheckpointSaverConfig, AsyncCheckpointSaverConfig):
        barrier = GrpcBarrierConfig(barrier_prefix=kind.__name__, run_id="torch-checkpointing")
        config = kind(writer_config=CheckpointWriterConfig(
            checkpoint_write_barrier_timeout_sec=60, barrier_config=barrier))
        # Its direct I/O fails with EINVAL on file systems that want aligned buffers.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        manager = CheckpointManager(CheckpointManager.Config(save=config, storage_config=storage))
        for step in range(2):
            path = f"{folder}/{kind.__name__}-{step}"
            pending = manager.save(path, {"weight": torch.full((8,), float(10 * step + rank))})
            if pending is not None:
                pending.result()
        # Rank 0 gives the folder its final name after the checkpoint's barrier; the others must not be first.
        dist.barrier()
        loaded = manager.load(path, {"weight": torch.zeros(8)})
        assert torch.equal(loaded["weight"], torch.full((8,), float(10 + rank))), loaded
        manager.close()
    dist.destroy_process_group()
    print("loaded")
"""


def run_ranks(program: str, tmp_path: Path, coordinator: Coordinator, world: int = 2) -> None:
    script = tmp_path / "program.py"
    script.write_text(program)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    ranks = [
        fork_client.popen(
            [sys.executable, str(script), str(rank), str(world), str(folder), coordinator.endpoint],
            spawns=True,
            env=os.environ | {"MUSTER_ENDPOINT": coordinator.endpoint},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    outputs = [rank.communicate(timeout=2 * PATIENCE)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(outputs)
    assert all("loaded" in output for output in outputs)


def decided(coordinator: Coordinator, run_id: str, count: int) -> list[tuple[int, str]]:
    """The barriers of a run, of which there must soon be so many: the log is written aside."""

    def lines() -> list[tuple[int, str]]:
        found = coordinator.log("barrier.decided")
        return [(line["sequence"], line["outcome"]) for line in found if line["run"] == run_id]

    until(lambda: len(lines()) >= count, lambda: str(lines()))
    return lines()


def test_torch_experimental_checkpointer(coordinator: Coordinator, tmp_path: Path):
    run_ranks(EXPERIMENTAL, tmp_path, coordinator)
    assert decided(coordinator, "experimental", 3) == [(n, "RELEASED") for n in range(3)]


def test_torch_experimental_async_checkpointer(coordinator: Coordinator, tmp_path: Path):
    run_ranks(ASYNC_EXPERIMENTAL, tmp_path, coordinator)
    assert decided(coordinator, "async-experimental", 2) == [(n, "RELEASED") for n in range(2)]


def test_torch_checkpointing(coordinator: Coordinator, tmp_path: Path):
    """Sync: the barrier lives in the trainer. Async: in its spawned checkpoint process."""
    run_ranks(TORCH_CHECKPOINTING, tmp_path, coordinator)
    assert sorted(decided(coordinator, "torch-checkpointing", 4)) == [
        (sequence, "RELEASED") for sequence in range(2) for _ in ("sync", "async")
    ]


def test_json_lines_of_the_log_are_json(coordinator: Coordinator):
    coordinator.logged("serving")
    for line in coordinator.log_path.read_text().splitlines():
        json.loads(line)
