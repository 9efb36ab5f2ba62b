"""``torch.save``, aside."""

import io
import math
import os
from collections import OrderedDict
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.patience import until
from lab.processes import fork_client
from muster.worker.errors import AsyncSaveError, MusterError
from muster.worker.saves import AsyncCallsQueue, Checkpointer, TorchAsyncCheckpoint
from muster.worker.saves.memory import staging
from muster.worker.saves.memory.state_copy import StateCopy
from tests.support.saves.child_processes import no_child_left
from tests.support.saves.fake_barrier import FakeBarrier


class Late:
    """Is pickled, as an empty dictionary, when its gate is there."""

    def __init__(self, gate: str) -> None:
        self._gate = gate

    def __deepcopy__(self, memo: dict[int, Any]) -> "Late":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        until(Path(self._gate).exists)
        return OrderedDict, ()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("persistent", [False, True])
def test_the_state_at_the_call_is_saved(tmp_path: Path, persistent: bool):
    # Both stay until this process ends.
    resource_tracker.ensure_running()
    fork_client.fork_server(*fork_client.TORCH)
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


@pytest.mark.parametrize("persistent", [False, True])
def test_the_state_is_copied_once(tmp_path: Path, persistent: bool, monkeypatch: pytest.MonkeyPatch):
    copied: list[int] = []
    storage = StateCopy._storage

    def counted(copy: StateCopy, one: torch.UntypedStorage) -> torch.UntypedStorage:
        copied.append(one.nbytes())
        return storage(copy, one)

    monkeypatch.setattr(StateCopy, "_storage", counted)
    checkpoint = TorchAsyncCheckpoint(persistent, barrier=FakeBarrier())  # type: ignore[arg-type]
    checkpoint.async_save({"weight": torch.zeros(1000)}, tmp_path / "w.pt")
    checkpoint.finalize_async_save(blocking=True, terminate=True)
    assert copied == [4000]


def test_it_saves_at_once_too(tmp_path: Path):
    checkpoint = TorchAsyncCheckpoint(barrier=FakeBarrier())  # type: ignore[arg-type]
    checkpoint.save({"a": 1}, tmp_path / "now.pt")
    checkpoint.save({"a": 2}, f=str(tmp_path / "now.pt"), pickle_protocol=2)
    assert torch.load(tmp_path / "now.pt") == {"a": 2}
    memory = io.BytesIO()
    checkpoint.save({"a": 3}, memory)
    memory.seek(0)
    assert torch.load(memory) == {"a": 3}
    assert names(tmp_path) == ["now.pt"]
    checkpoint.close()


def test_a_file_is_replaced_when_every_rank_has_written_it(tmp_path: Path):
    path, gate = tmp_path / "w.pt", tmp_path / "gate"
    checkpoint = TorchAsyncCheckpoint(barrier=FakeBarrier())  # type: ignore[arg-type]
    checkpoint.save({"step": 1}, path)
    (tmp_path / "link").symlink_to(path)
    checkpoint.async_save({"step": 2, "late": Late(str(gate))}, tmp_path / "link")
    assert torch.load(path) == {"step": 1}
    gate.touch()
    checkpoint.finalize_async_save(blocking=True, terminate=True)
    assert torch.load(path) == {"step": 2, "late": {}}
    assert names(tmp_path) == ["gate", "link", "w.pt"]
    assert (tmp_path / "link").is_symlink()


def test_a_file_stays_as_it_was_when_a_rank_has_failed(tmp_path: Path):
    barrier = FakeBarrier(world_size=2)
    barrier.others_fail[0] = "No space left on device"
    checkpoint = TorchAsyncCheckpoint(barrier=barrier)  # type: ignore[arg-type]
    checkpoint.save({"step": 1}, tmp_path / "w.pt")
    checkpoint.async_save({"step": 2}, tmp_path / "w.pt")
    with pytest.raises(AsyncSaveError):
        checkpoint.close()
    assert torch.load(tmp_path / "w.pt") == {"step": 1}
    assert names(tmp_path) == ["w.pt"]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done: list[tuple[str, str, int]] = []
    fsync, replace = os.fsync, Path.replace

    def watch_fsync(file: int) -> None:
        name = str(Path(f"/proc/self/fd/{file}").readlink())
        done.append(("fsync", name, os.fstat(file).st_size))
        fsync(file)

    def watch_replace(path: Path, target: Path) -> Path:
        done.append(("rename", str(path), path.stat().st_size))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(Path, "replace", watch_replace)
    checkpoint = TorchAsyncCheckpoint(barrier=FakeBarrier())  # type: ignore[arg-type]
    checkpoint.save({"weight": torch.ones(10_000)}, tmp_path / "w.pt")
    checkpoint.close()
    size = (tmp_path / "w.pt").stat().st_size
    (_, temporary, _), _, (_, folder, _) = done
    assert [(what, size) for what, _, size in done[:2]] == [("fsync", size), ("rename", size)]
    assert done[1][1] == temporary != str(tmp_path / "w.pt")
    assert done[2][0] == "fsync"
    assert folder == str(tmp_path)


def test_an_open_file_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fsync = os.fsync

    def recorded(file: int) -> None:
        with (tmp_path / "synced").open("a") as sizes:
            sizes.write(f"{os.fstat(file).st_size}\n")
        fsync(file)

    monkeypatch.setattr(os, "fsync", recorded)
    checkpoint = TorchAsyncCheckpoint(barrier=FakeBarrier())  # type: ignore[arg-type]
    with (tmp_path / "w.pt").open("wb") as file:
        checkpoint.async_save({"weight": torch.ones(1000)}, file)
        checkpoint.finalize_async_save(blocking=True, terminate=True)
    assert torch.load(tmp_path / "w.pt")["weight"].tolist() == [1.0] * 1000
    assert (tmp_path / "synced").read_text() == f"{(tmp_path / 'w.pt').stat().st_size}\n"


def test_a_device_has_nothing_to_sync():
    checkpoint = TorchAsyncCheckpoint(barrier=FakeBarrier())  # type: ignore[arg-type]
    with Path(os.devnull).open("wb") as file:
        checkpoint.save({"weight": torch.ones(3)}, file)
        checkpoint.save({"weight": torch.ones(3)}, os.devnull)
        checkpoint.async_save({"weight": torch.ones(3)}, file)
        checkpoint.finalize_async_save(blocking=True, terminate=True)


def test_memory_of_this_process_is_no_place_to_write_to():
    checkpoint = TorchAsyncCheckpoint(barrier=FakeBarrier())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"in the memory of this process.*Give a path"):
        checkpoint.async_save({"a": 1}, io.BytesIO())
    checkpoint.close()


@pytest.mark.parametrize("timeout", [0, -1.0, math.inf, math.nan])
def test_a_timeout_that_nothing_can_keep_is_refused(timeout: float):
    with pytest.raises(ValueError, match=r"timeout = .*: it must be a finite number of seconds above 0"):
        TorchAsyncCheckpoint(barrier=FakeBarrier(), timeout=timeout)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout"):
        AsyncCallsQueue(barrier=FakeBarrier(), timeout=timeout)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout"):
        Checkpointer("/no/such/folder", barrier=FakeBarrier(), timeout=timeout)  # type: ignore[arg-type]


def test_a_path_that_cannot_be_written_is_an_error_and_the_buffers_go_back(tmp_path: Path):
    checkpoint = TorchAsyncCheckpoint(barrier=FakeBarrier())  # type: ignore[arg-type]
    checkpoint.async_save({"weight": torch.ones(3)}, tmp_path / "no folder" / "w.pt")
    with pytest.raises(AsyncSaveError, match="no folder"):
        checkpoint.finalize_async_save(blocking=True)
    assert checkpoint._buffers is not None
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
