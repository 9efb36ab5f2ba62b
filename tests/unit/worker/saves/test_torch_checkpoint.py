"""``torch.save``, aside."""

from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch

from muster.worker.errors import AsyncSaveError, MusterError
from muster.worker.saves import TorchAsyncCheckpoint, staging
from tests.support import nursery
from tests.support.judge import FakeBarrier, no_child_left


@pytest.mark.parametrize("persistent", [False, True])
def test_the_state_at_the_call_is_saved(tmp_path: Path, persistent: bool):
    # Both stay until this process ends.
    resource_tracker.ensure_running()
    nursery.nursery(*nursery.TORCH)
    with no_child_left():
        checkpoint = TorchAsyncCheckpoint(persistent, barrier=FakeBarrier())  # type: ignore[arg-type]
        weight = torch.zeros(1000)
        for step in range(4):
            weight.fill_(step)
            assert checkpoint.async_save({"weight": weight}, tmp_path / f"{step}.pt") == step
            weight.fill_(-1)
        checkpoint.finalize_async_save(blocking=True, terminate=True)
    for step in range(4):
        assert torch.equal(torch.load(tmp_path / f"{step}.pt")["weight"], torch.full((1000,), float(step)))
    with pytest.raises(MusterError, match="closed"):
        checkpoint.async_save({}, tmp_path / "late.pt")


def test_it_saves_at_once_too(tmp_path: Path):
    checkpoint = TorchAsyncCheckpoint(barrier=FakeBarrier())  # type: ignore[arg-type]
    checkpoint.save({"a": 1}, tmp_path / "now.pt")
    assert torch.load(tmp_path / "now.pt") == {"a": 1}
    checkpoint.close()


def test_a_path_that_cannot_be_written_is_an_error_and_the_buffers_go_back(tmp_path: Path):
    checkpoint = TorchAsyncCheckpoint(barrier=FakeBarrier())  # type: ignore[arg-type]
    checkpoint.async_save({"weight": torch.ones(3)}, tmp_path / "no folder" / "w.pt")
    with pytest.raises(AsyncSaveError, match="no folder"):
        checkpoint.finalize_async_save(blocking=True)
    assert len(checkpoint._buffers._free) == 1
    checkpoint.close()


def test_a_full_disk_is_an_error(tmp_path: Path):
    checkpoint = TorchAsyncCheckpoint(barrier=FakeBarrier())  # type: ignore[arg-type]
    checkpoint.async_save({"weight": torch.ones(100_000)}, "/dev/full")
    with pytest.raises(AsyncSaveError, match="exit status 1"):
        checkpoint.close()


def test_nothing_is_copied_after_closing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoint = TorchAsyncCheckpoint(barrier=FakeBarrier())  # type: ignore[arg-type]
    checkpoint.close()
    monkeypatch.delattr(checkpoint, "_buffers")
    with pytest.raises(MusterError, match="closed"):
        checkpoint.async_save({"weight": torch.ones(3)}, tmp_path / "w.pt")


def test_a_copy_that_fails_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoint = TorchAsyncCheckpoint(barrier=FakeBarrier())  # type: ignore[arg-type]
    with monkeypatch.context() as patched:
        patched.setattr(staging, "available_memory", lambda: 10)
        with pytest.raises(MemoryError):
            checkpoint.async_save({"weight": torch.ones(1000)}, tmp_path / "0.pt")
    assert checkpoint.async_save({"weight": torch.ones(1000)}, tmp_path / "1.pt") == 1
    with pytest.raises(AsyncSaveError, match="MemoryError"):
        checkpoint.close()


def test_terminating_closes_although_a_save_failed():
    checkpoint = TorchAsyncCheckpoint(barrier=FakeBarrier())  # type: ignore[arg-type]
    checkpoint.async_save({"weight": torch.ones(3)}, "/no/such/folder")
    with pytest.raises(AsyncSaveError):
        checkpoint.finalize_async_save(blocking=True, terminate=True)
    with pytest.raises(MusterError, match="closed"):
        checkpoint.async_save({}, "late.pt")
