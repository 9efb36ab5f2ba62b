"""Saves of what is on a real GPU: the order of copies and kernels, pinned buffers, forks beside NCCL."""

import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

import muster.worker
from lab.processes.coordinator import Coordinator
from muster.worker import Checkpointer, GrpcBarrier, TorchAsyncCheckpoint
from muster.worker.saves import AsyncRequest, ForkCaller
from tests.support.saves.child_processes import no_child_left

pytestmark = pytest.mark.gpu_only

SIZE = 4 << 20
"""Elements of a tensor: 16 MiB."""


@pytest.fixture
def barrier(tmp_path: Path) -> Iterator[GrpcBarrier]:
    with Coordinator(tmp_path) as coordinator:
        yield GrpcBarrier(0, 1, "save", coordinator.endpoint, 20, 60, "gpu", 0)
        muster.worker.close()


@pytest.fixture
def made(tmp_path: Path, barrier: GrpcBarrier) -> Iterator[Checkpointer]:
    with no_child_left():
        one = Checkpointer(tmp_path / "checkpoints", barrier=barrier, timeout=60)
        yield one
        one.close()


def state(value: float, tensors: int = 4, device: str = "cuda") -> dict[str, torch.Tensor]:
    return {f"layer-{n}": torch.full((SIZE,), value, device=device) for n in range(tensors)}


def keep_busy() -> None:
    """The kernels that follow on this stream wait for some tenths of a second."""
    torch.cuda._sleep(500_000_000)


def saved(made: Checkpointer, step: int) -> set[float]:
    """The values in a checkpoint."""
    into = state(-1)
    made.load(into, Path(str(made._folder)) / f"step-{step:010}")
    return {value for tensor in into.values() for value in tensor.unique().tolist()}


def test_save_includes_kernels_launched_before_the_call_but_not_after_the_call(made: Checkpointer):
    now = state(0)
    for step in range(1, 6):
        keep_busy()
        for tensor in now.values():
            tensor.fill_(step)
        made.save(step, now)
        for tensor in now.values():
            tensor.fill_(-step)
    assert made.finalize(blocking=True) == [1, 2, 3, 4, 5]
    assert [saved(made, step) for step in range(1, 6)] == [{float(step)} for step in range(1, 6)]


def test_save_includes_writes_of_another_stream_that_the_current_stream_waited_for(made: Checkpointer):
    now = state(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        keep_busy()
        for tensor in now.values():
            tensor.fill_(7)
    torch.cuda.current_stream().wait_stream(side)
    made.save(1, now)
    assert made.finalize(blocking=True) == [1]
    assert saved(made, 1) == {7.0}


@pytest.fixture
def second() -> str:
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU; run it on one that has two")
    return "cuda:1"


def test_earlier_work_of_a_gpu_that_is_not_current_is_saved(made: Checkpointer, second: str):
    now = state(0, device=second) | {"first": torch.zeros(SIZE, device="cuda:0")}
    for step in range(1, 4):
        with torch.cuda.device(second):
            keep_busy()
        for tensor in now.values():
            tensor.fill_(step)
        made.save(step, now)
        for tensor in now.values():
            tensor.fill_(-step)
    assert made.finalize(blocking=True) == [1, 2, 3]
    for step in range(1, 4):
        into = {name: torch.zeros(SIZE) for name in now}
        made.load(into, Path(str(made._folder)) / f"step-{step:010}")
        assert {value for tensor in into.values() for value in tensor.unique().tolist()} == {float(step)}


def test_a_preload_function_may_leave_copies_of_any_gpu_under_way(tmp_path: Path, second: str):
    weight = torch.zeros(SIZE, device=second)
    host = torch.empty(SIZE, pin_memory=True)
    with torch.cuda.device(second):
        keep_busy()
        weight.fill_(5)

    def preload() -> torch.Tensor:
        return host.copy_(weight, non_blocking=True)

    assert torch.cuda.current_device() == 0
    path = tmp_path / "weight.pt"
    request = AsyncRequest(lambda path, state: torch.save(state, path), (path, None), [], preload_fn=preload)
    assert ForkCaller().start(request).wait(60).failure is None
    assert torch.load(path).unique().tolist() == [5.0]


def test_a_child_that_writes_late_still_has_its_own_step(
    made: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The child shares the pinned buffers, so the next save must not use them."""
    gate = tmp_path / "gate"
    write = FileSystemWriter.write_data

    def late(*arguments: Any) -> Any:
        while not gate.exists():
            time.sleep(0.005)
        return write(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(FileSystemWriter, "write_data", late)
        for step in (1, 2, 3):
            made.save(step, state(step))
    assert len(made._buffers._free) == 0, "all are held"
    gate.touch()
    assert made.finalize(blocking=True) == [1, 2, 3]
    assert [saved(made, step) for step in (1, 2, 3)] == [{1.0}, {2.0}, {3.0}]
    made.save(4, state(4))
    assert made.finalize(blocking=True) == [4]
    assert len(made._buffers._free) == 3, "they are used again"


def test_the_buffers_are_pinned_and_the_child_finds_no_gpu(
    made: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen = tmp_path / "seen"
    write = FileSystemWriter.write_data

    def look(writer: Any, plan: Any, planner: Any) -> Any:
        devices = {planner.lookup_object(item.index).device.type for item in plan.items}
        try:
            torch.cuda.current_stream()
            touched = True
        except RuntimeError:  # Torch's own: it cannot be used in a forked child.
            touched = False
        seen.write_bytes(pickle.dumps((devices, touched)))
        return write(writer, plan, planner)

    monkeypatch.setattr(FileSystemWriter, "write_data", look)
    held = made._buffers.stage(state(1))
    assert all(tensor.is_pinned() for tensor in held.state.values())
    held.release()
    made.save(1, state(1))
    assert made.finalize(blocking=True) == [1]
    assert pickle.loads(seen.read_bytes()) == ({"cpu"}, False)


def test_forks_beside_the_threads_of_nccl(made: Checkpointer, tmp_path: Path, thorough: bool):
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        flag = torch.ones(1 << 20, device="cuda")
        saves = 200 if thorough else 20
        for step in range(saves):
            dist.all_reduce(flag)
            made.save(step, state(step, tensors=1))
            dist.all_reduce(flag)
        assert made.finalize(blocking=True) == list(range(saves))
    finally:
        dist.destroy_process_group()


def test_the_call_that_torch_users_know(
    tmp_path: Path, barrier: GrpcBarrier, monkeypatch: pytest.MonkeyPatch
):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MUSTER_ENDPOINT": barrier.config.endpoint}.items():
        monkeypatch.setitem(os.environ, name, value)
    checkpoint = TorchAsyncCheckpoint()
    now = state(3)
    keep_busy()
    checkpoint.async_save(now, tmp_path / "state.pt")
    for tensor in now.values():
        tensor.fill_(-1)
    checkpoint.finalize_async_save(blocking=True, no_dist=True, terminate=True)
    loaded = torch.load(tmp_path / "state.pt", map_location="cpu")
    assert {value for tensor in loaded.values() for value in tensor.unique().tolist()} == {3.0}
