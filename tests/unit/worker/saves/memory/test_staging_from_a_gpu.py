"""Copies from GPUs to the host: the order of the calls to CUDA, and the buffers. The GPUs are a fake."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from lab.patience import PATIENCE
from muster.worker import Checkpointer, TorchAsyncCheckpoint
from muster.worker.saves import AsyncRequest, ForkCaller
from muster.worker.saves.memory.host_memory import HostMemory, Location
from muster.worker.saves.memory.staging import Held, HostBuffers, unshared
from muster.worker.saves.memory.state_copy import StateCopy
from muster.worker.saves.writers import handover
from muster.worker.saves.writers.callers import PersistentCaller
from tests.support.saves.child_processes import state_of
from tests.support.saves.fake_barrier import FakeBarrier
from tests.support.saves.mappings import permissions_at


class FakeCuda:
    """A machine of three GPUs, of which this process uses two: the calls that staging makes, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.pinned: list[tuple[int, int]] = []

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 3

    def has_context(self, device: int) -> bool:
        return device != 1

    def synchronize(self, device: int) -> None:
        self.calls.append(f"synchronize {device}")

    def cudart(self) -> "FakeCuda":
        return self

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:  # noqa: N802
        assert flags == 1
        self.pinned.append((start, size))
        return 0

    def cudaHostUnregister(self, start: int) -> int:  # noqa: N802
        assert permissions_at(start) is not None, "it is no more mapped"
        self.pinned = [one for one in self.pinned if one[0] != start]
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("is_available", "is_initialized", "device_count", "synchronize", "cudart"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", fake.has_context, raising=False)
    copy = StateCopy.copy

    def copied(state_copy: StateCopy, value: Any) -> Any:
        fake.calls.append("copy")
        return copy(state_copy, value)

    monkeypatch.setattr(StateCopy, "copy", copied)
    return fake


WAITED = ["synchronize 0", "synchronize 2"]
"""The calls that wait for the copies of every GPU in use."""


def test_copies_are_waited_for_once_when_they_are_needed(cuda: FakeCuda):
    held = HostBuffers().stage({"weight": torch.ones(3)})
    assert cuda.calls == ["copy"]
    held.wait()
    held.wait()
    assert cuda.calls == ["copy", *WAITED]


def test_memory_to_which_copies_go_is_not_used_again_before_they_have_ended(cuda: FakeCuda):
    """Who gives it back need not wait: it may be a thread that votes."""
    buffers = HostBuffers()
    buffers.stage({"weight": torch.ones(3)}).release()
    with pytest.raises(TypeError, match="pickle"):
        buffers.stage([torch.ones(3), threading.Lock()])
    held = buffers.stage({"weight": torch.ones(3)})
    assert cuda.calls == ["copy", *WAITED, "copy", *WAITED, "copy"]
    held.wait()


def test_memory_from_before_the_gpu_was_used_is_replaced(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch):
    """It is neither pinned nor shared with a child."""
    buffers = HostBuffers()
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: False)
        buffers.stage({"weight": torch.ones(3)}).release()
    held = buffers.stage({"weight": torch.ones(3)})
    assert permissions_at(held.state["weight"].data_ptr()) == "rw-s"
    assert len(cuda.pinned) == 1


def test_memory_is_unpinned_when_no_copy_goes_there_any_more(cuda: FakeCuda):
    HostBuffers().stage({"weight": torch.ones(3)})
    assert cuda.calls == ["copy", *WAITED]
    assert cuda.pinned == []


def test_objects_are_pickled_for_another_process_when_their_tensors_have_arrived(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
):
    """They may look at them."""
    pickle_into = handover.pickle_into

    def pickled(memory: HostMemory, request: AsyncRequest) -> Location:
        cuda.calls.append("pickle")
        return pickle_into(memory, request)

    monkeypatch.setattr(handover, "pickle_into", pickled)
    held, _ = PersistentCaller()._on_host(AsyncRequest(torch.numel, (torch.ones(3),), []))
    assert cuda.calls == ["copy", *WAITED, "pickle"]
    held.release()


class _Late:
    """The copies of a fake GPU: what was staged arrives when it is waited for."""

    def __init__(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        stage, fork = HostBuffers.stage, os.fork

        def staged(buffers: HostBuffers, state: Any) -> Held:
            held = stage(buffers, state)
            value = held.state["weight"].clone()
            held.state["weight"].zero_()

            def arrive(_: int) -> None:
                if held.state is not None:  # Else what waits is memory that is freed, after the save.
                    held.state["weight"].copy_(value)
                cuda.calls.append("arrived")

            monkeypatch.setattr(torch.cuda, "synchronize", arrive)
            return held

        def forked() -> int:
            cuda.calls.append("fork")
            return fork()

        monkeypatch.setattr(HostBuffers, "stage", staged)
        monkeypatch.setattr(os, "fork", forked)


FORKED = ["copy", "fork", "arrived", "arrived"]
"""The calls of a save with copies from two GPUs that go on during the fork."""


class _Planner(DefaultSavePlanner):
    """It may look at values."""


@pytest.mark.parametrize(
    ("planner", "calls"),
    [
        (None, FORKED),
        (DefaultSavePlanner(), FORKED),
        (_Planner(), ["copy", "arrived", "arrived", "fork"]),
    ],
)
def test_a_save_forks_while_the_copies_go_on(
    cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    planner: DefaultSavePlanner | None,
    calls: list[str],
):
    _Late(cuda, monkeypatch)
    weight = torch.full((3,), 7.0)
    made = Checkpointer(tmp_path, copy=True, barrier=FakeBarrier())  # type: ignore[arg-type]
    made.save(1, {"weight": weight}, planner=planner)
    weight.zero_()
    assert made.finalize(blocking=True) == [1]
    made.load({"weight": weight})
    made.close()
    assert weight.tolist() == [7.0] * 3
    assert cuda.calls[:4] == calls


def test_a_file_is_written_when_the_copies_have_arrived(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    _Late(cuda, monkeypatch)
    weight = torch.full((3,), 7.0)
    checkpoint = TorchAsyncCheckpoint(barrier=FakeBarrier())  # type: ignore[arg-type]
    checkpoint.async_save({"weight": weight}, tmp_path / "state.pt")
    weight.zero_()
    checkpoint.finalize_async_save(blocking=True, terminate=True)
    assert torch.load(tmp_path / "state.pt")["weight"].tolist() == [7.0] * 3
    assert cuda.calls[:4] == FORKED


def test_pinned_tensors_are_copied_when_what_goes_to_them_has_arrived(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    held = HostBuffers().stage({"weight": torch.ones(3)})
    assert cuda.calls == [*WAITED, "copy"]
    held.release()


def test_fork_waits_for_every_gpu_in_use(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch):
    fork = os.fork

    def forked() -> int:
        cuda.calls.append("fork")
        return fork()

    monkeypatch.setattr(os, "fork", forked)
    preload = lambda: cuda.calls.append("preload")  # noqa: E731
    shared = torch.ones(3).share_memory_()
    write = ForkCaller().start(AsyncRequest(lambda *_: None, (shared, None), [], preload_fn=preload))
    assert write.wait(PATIENCE).failure is None
    assert state_of(write.pid) is None
    # Pinned memory can be shared memory, too: it is not copied before the copies to it have ended.
    assert cuda.calls == ["preload", *WAITED, "copy", "fork"]


def test_a_process_that_does_not_use_its_gpus_does_not_begin_to(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    HostBuffers().stage({"weight": torch.ones(3)})
    assert cuda.calls == ["copy"]
    assert cuda.pinned == []


def test_buffers_beside_a_gpu_are_pinned_until_nobody_holds_them(cuda: FakeCuda):
    buffers = HostBuffers()
    held = buffers.stage({"weight": torch.ones(3)})
    weight = held.state["weight"]
    ((start, size),) = cuda.pinned
    assert start <= weight.data_ptr() < start + size
    del held, buffers
    assert len(cuda.pinned) == 1, "a tensor of the copy is there still"
    del weight
    assert cuda.pinned == []


def test_a_child_shares_the_pinned_buffers_and_nobody_copies_them_for_it(cuda: FakeCuda):
    """A fork copies every page that is pinned and private."""
    held = HostBuffers().stage({"weight": torch.ones(3)})
    assert permissions_at(held.state["weight"].data_ptr()) == "rw-s"
    assert unshared(held.state)["weight"] is held.state["weight"]


def test_memory_that_cannot_be_pinned_is_an_error(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda, "cudaHostRegister", lambda *_: 2)
    with pytest.raises(RuntimeError, match=r"could not be pinned \(CUDA error 2\)"):
        HostBuffers().stage({"weight": torch.ones(3)})
