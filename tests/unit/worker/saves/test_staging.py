"""Copies on the host, and the buffers that they are in."""

import mmap
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from muster.worker.saves import AsyncRequest, ForkCaller, staging
from muster.worker.saves.staging import HostBuffers, check_memory, size_of, survive_fork, tensors_of, unshared
from tests.support.judge import state_of
from tests.support.patience import PATIENCE


def test_a_copy_does_not_change_with_what_was_copied():
    weight = torch.arange(10.0)
    held = HostBuffers().stage({"model": [weight, weight[2:4]], "step": 3})
    weight.fill_(-1)
    assert torch.equal(held.state["model"][0], torch.arange(10.0))
    assert torch.equal(held.state["model"][1], torch.tensor([2.0, 3.0]))
    assert held.state["step"] == 3


def test_buffers_are_used_again_only_when_the_write_has_ended():
    buffers, weight = HostBuffers(), torch.zeros(10)
    first = buffers.stage([weight])
    where = first.state[0].data_ptr()
    weight.fill_(1)
    second = buffers.stage([weight])
    assert second.state[0].data_ptr() != where
    assert torch.equal(first.state[0], torch.zeros(10))
    first.release()
    weight.fill_(2)
    third = buffers.stage([weight])
    assert third.state[0].data_ptr() == where
    assert torch.equal(second.state[0], torch.ones(10))
    assert torch.equal(third.state[0], torch.full((10,), 2.0))


def test_buffers_of_a_shared_pool_are_in_shared_memory():
    held = HostBuffers(shared=True).stage({"weight": torch.ones(3)})
    assert held.state["weight"].is_shared()


def test_tensors_are_found_wherever_a_state_may_hold_them():
    one, two, three = torch.ones(1), torch.ones(2), torch.nn.Parameter(torch.ones(3))
    assert [t.numel() for t in tensors_of({"a": [one, (two, {"b": three})], "c": 1, "d": None})] == [1, 2, 3]


def test_what_is_in_shared_memory_does_not_survive_a_fork():
    assert survive_fork([torch.ones(3)])
    assert not survive_fork([torch.ones(3), torch.ones(3).share_memory_()])


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.ones(3, device="meta")], ids=str)
def test_tensors_without_a_storage_on_the_host_are_taken_too(tensor: torch.Tensor):
    assert survive_fork([tensor])
    assert unshared({"weight": tensor})["weight"] is tensor


def test_only_what_is_shared_is_copied():
    own, shared = torch.ones(3), torch.ones(3).share_memory_()
    state = {"own": own, "list": [own, shared], "tuple": (shared, 7)}
    copied = unshared(state)
    assert state["list"][1] is shared
    assert copied["own"] is own
    assert copied["list"][0] is own
    assert not copied["list"][1].is_shared()
    assert not copied["tuple"][0].is_shared()
    assert copied["tuple"][1] == 7
    assert unshared([own]) == [own]


@pytest.mark.parametrize(("free", "fits"), [(2_223, True), (2_222, False)])
def test_a_copy_for_which_there_is_no_room_is_refused(free: int, fits: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(staging, "available_memory", lambda: free)
    tensors = [torch.zeros(250, dtype=torch.float64)]
    if fits:
        check_memory(size_of(tensors))
    else:
        with pytest.raises(MemoryError, match=r"free memory.*Wait for earlier saves"):
            check_memory(size_of(tensors))


def test_buffers_that_are_there_need_no_free_memory(monkeypatch: pytest.MonkeyPatch):
    buffers = HostBuffers()
    buffers.stage({"weight": torch.zeros(250)}).release()
    monkeypatch.setattr(staging, "available_memory", lambda: 0)
    buffers.stage({"weight": torch.zeros(250)}).release()
    with pytest.raises(MemoryError):
        buffers.stage({"weight": torch.zeros(251)})
    held = buffers.stage({"weight": torch.zeros(250)})
    with pytest.raises(MemoryError):
        buffers.stage({"weight": torch.zeros(250)})
    held.release()


@pytest.mark.parametrize("kind", ["mmap", "memmap", "from_file", "torch.load"])
def test_what_is_mapped_to_be_written_is_shared(kind: str, tmp_path: Path):
    path = tmp_path / "mapped"
    if kind == "mmap":
        tensor = torch.frombuffer(mmap.mmap(-1, 4096), dtype=torch.float32)
    elif kind == "memmap":
        tensor = torch.from_numpy(np.memmap(path, np.float32, "w+", shape=(8,)))
    elif kind == "from_file":
        tensor = torch.from_file(str(path), shared=True, size=8)
    else:
        torch.save(torch.zeros(8), path)
        torch.serialization.set_default_mmap_options(mmap.MAP_SHARED)
        try:
            tensor = torch.load(path, mmap=True)
        finally:
            torch.serialization.set_default_mmap_options(mmap.MAP_PRIVATE)
    assert not survive_fork([tensor])
    assert survive_fork([unshared(tensor)])
    part = tensor.view(2, -1)[1]
    assert not survive_fork([part])
    assert survive_fork([torch.empty(0), torch.ones(3).to_sparse(), torch.empty(3, device="meta")])


def test_the_kernel_says_how_much_memory_is_free():
    assert 0 < staging.available_memory() < 2**50


def test_a_container_has_less_than_the_machine(tmp_path: Path):
    of_machine = staging.available_memory(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert abs(staging.available_memory(tmp_path) - of_machine) < 2**32
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 300000\nactive_file 100000\n")
    assert staging.available_memory(tmp_path) == 500_000


# ---------------------------------------------------------------------- the order of the calls to CUDA


class FakeCuda:
    """The calls that staging makes, written down in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def current_stream(self) -> str:
        return "compute"

    def Stream(self) -> "FakeCuda":  # noqa: N802
        return self

    def wait_stream(self, stream: str) -> None:
        self.calls.append(f"side waits for {stream}")

    @contextmanager
    def stream(self, side: "FakeCuda") -> Any:
        assert side is self
        self.calls.append("side begins")
        yield
        self.calls.append("side ends")

    def synchronize(self) -> None:
        self.calls.append("synchronize")


class FakeStager:
    def __init__(self, cuda: FakeCuda, options: Any) -> None:
        self._cuda = cuda
        assert (options.use_pinned_memory, options.use_non_blocking_copy) == (True, True)
        assert not options.use_async_staging

    def stage(self, state: Any) -> Any:
        self._cuda.calls.append("copy")
        return state


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("is_available", "is_initialized", "current_stream", "Stream", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(staging, "DefaultStager", lambda options: FakeStager(fake, options))
    return fake


def test_copies_from_a_gpu_follow_the_computation_and_have_ended_when_they_are_handed_over(cuda: FakeCuda):
    HostBuffers().stage({"weight": torch.ones(3)})
    assert cuda.calls == ["side waits for compute", "side begins", "copy", "side ends", "synchronize"]


def test_the_gpu_has_done_all_before_the_fork(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch):
    import os

    fork = os.fork

    def forked() -> int:
        cuda.calls.append("fork")
        return fork()

    monkeypatch.setattr(os, "fork", forked)
    preload = lambda: cuda.calls.append("preload")  # noqa: E731
    write = ForkCaller().start(AsyncRequest(lambda *_: None, ("path", None), [], preload_fn=preload))
    assert write.wait(PATIENCE).failure is None
    assert state_of(write.pid) is None
    assert cuda.calls == ["preload", "synchronize", "fork"]


def test_a_process_that_does_not_use_its_gpu_does_not_begin_to(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    HostBuffers().stage({"weight": torch.ones(3)})
    assert cuda.calls == ["copy"]
