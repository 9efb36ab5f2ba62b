"""A save of one rank: the files that it commits, its plan, and what it reports."""

import os
import time
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from muster.worker.errors import AsyncSaveError
from muster.worker.saves import Checkpointer, SaveTimings
from muster.worker.saves.planning.plans import Plans
from tests.support.expect import raising
from tests.support.saves.child_processes import no_child_left
from tests.support.saves.fake_barrier import FakeBarrier
from tests.unit.worker.saves.checkpointer.states import loaded, save_steps, state

FILES = [".metadata", "__0_0.distcp", "committed.json", "manifest.json"]


@pytest.mark.parametrize("how", ["shared with the child", "copied", "in shared memory"])
def test_the_state_at_the_call_is_committed(how: str, tmp_path: Path, barrier: FakeBarrier):
    copied = how == "copied"
    made = Checkpointer(tmp_path, copy=copied, barrier=barrier)  # type: ignore[arg-type]
    now = state(0)
    if how == "in shared memory":
        now["model"]["weight"].share_memory_()
    for step in range(4):
        now["model"]["weight"].fill_(step)
        now["step"] = step
        made.save(step, now)
        now["model"]["weight"].fill_(-1)
    assert made.finalize(blocking=True) == [0, 1, 2, 3]
    for step in range(4):
        assert loaded(made, tmp_path / f"step-{step:010}") == (step, step)
    assert loaded(made) == (3, 3)
    latest = made.latest()
    assert latest is not None
    assert (latest.world_size, latest.run_id, latest.prefix, latest.sequence) == (1, "job", "save", 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:010}" for step in range(4)]
    made.close()


def test_the_copy_is_part_of_the_stall(tmp_path: Path, barrier: FakeBarrier, monkeypatch: pytest.MonkeyPatch):
    heard: list[SaveTimings] = []
    waited: list[float] = []
    made = Checkpointer(tmp_path, copy=True, barrier=barrier, on_saved=heard.append)  # type: ignore[arg-type]
    stage = made._buffers.stage

    def slow(whole: Any) -> Any:
        began = time.monotonic()
        held = stage(whole)
        waited.append(time.monotonic() - began)
        return held

    monkeypatch.setattr(made._buffers, "stage", slow)
    made.save(1, state(1))
    made.close()
    assert heard[0].preload >= waited[0] > 0


class App:
    """A ``Stateful`` object, as in torch's tutorial."""

    def __init__(self, value: float) -> None:
        self.module = torch.nn.Linear(3, 2)
        torch.nn.init.constant_(self.module.weight, value)
        self.step = int(value)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.module.state_dict(), "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.module.load_state_dict(state_dict["model"])
        self.step = state_dict["step"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # Torch's own save.
@pytest.mark.parametrize("copy", [True, False])
def test_stateful_objects_are_saved_and_loaded(tmp_path: Path, barrier: FakeBarrier, copy: bool):
    made = Checkpointer(tmp_path, copy=copy, barrier=barrier)  # type: ignore[arg-type]
    made.save(7, {"app": App(7), "lr": 0.5})
    assert made.finalize(blocking=True) == [7]
    into: dict[str, Any] = {"app": App(0), "lr": 0.0}
    assert made.load(into).step == 7
    assert into["lr"] == 0.5
    assert into["app"].step == 7
    assert torch.equal(into["app"].module.weight, torch.full((2, 3), 7.0))
    plain = tmp_path / "by torch"
    dcp.save({"app": App(7), "lr": 0.5}, checkpoint_id=plain)
    ours, theirs = (
        dcp.FileSystemReader(path).read_metadata() for path in (tmp_path / "step-0000000007", plain)
    )
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    made.close()


def test_every_file_is_synced_at_its_final_size_before_the_commit(
    tmp_path: Path, barrier: FakeBarrier, monkeypatch: pytest.MonkeyPatch
):
    """On rank 0; the child's are seen by the crash tests, from outside."""
    folder = tmp_path / "new" / "job"
    synced: list[tuple[str, int]] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append((str(Path(f"/proc/self/fd/{handle}").readlink()), os.fstat(handle).st_size))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    made = Checkpointer(folder, barrier=barrier)  # type: ignore[arg-type]
    save_steps(made, 1)
    made.close()
    names = [name for name, _ in synced]
    step = folder / "step-0000000001"
    unfinished = folder / f".step-0000000001.0-0-{crc32(b'job'):08x}"
    files = {name: size for name, size in synced if Path(name).parent == unfinished}
    before = names[: next(number for number, name in enumerate(names) if name in files)]
    assert {str(tmp_path), str(tmp_path / "new")} <= set(before), "what was made is in its parent"
    want = {name: (step / name).stat().st_size for name in (".metadata", "manifest.json", "committed.json")}
    found = {Path(name).name.removesuffix(".tmp"): size for name, size in files.items()}
    assert found == want
    last = names[-2:]
    assert last == [str(unfinished), str(folder)], "its entries, then its name"


def test_votes_report_step_bytes_and_seconds(made: Checkpointer, barrier: FakeBarrier):
    save_steps(made, 7)
    with pytest.raises(ValueError, match="committed already"):
        made.save(7, state(7))
    with pytest.raises(AsyncSaveError):
        made.finalize(blocking=True)
    (written, failed), (committed,) = barrier.reports, barrier.siblings["save/commit"].reports
    for report in (written, committed):
        assert report is not None
        assert (report.step, report.bytes) == (7, 4 * 1003)
        assert report.seconds is not None
        assert report.seconds > 0
    assert [report and report.commits for report in (written, committed)] == [False, True]
    assert failed is not None
    assert (failed.step, failed.bytes) == (7, None)


def test_metadata_names_the_checkpoint_and_not_the_draft(made: Checkpointer, tmp_path: Path):
    save_steps(made, 1)
    metadata = dcp.FileSystemReader(tmp_path / "step-0000000001").read_metadata()
    assert metadata.storage_meta is not None
    assert str(metadata.storage_meta.checkpoint_id) == str(tmp_path / "step-0000000001")


def test_planner_that_caches_plans_is_refused(made: Checkpointer):
    with pytest.raises(ValueError, match="enable_plan_caching"):
        made.save(1, state(1), planner=DefaultSavePlanner(enable_plan_caching=True))
    save_steps(made, 1)


def test_planners_of_the_caller_are_used(made: Checkpointer):
    made.save(
        1, state(1), planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    )
    assert made.finalize(blocking=True) == [1]
    into = state(0)
    made.load(into, planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False))
    assert into["step"] == 1
    made.save(2, state(2))
    assert made.finalize(blocking=True) == [2]
    more = state(0) | {"more": torch.zeros(3)}
    with pytest.raises(RuntimeError, match=r"step-0000000002 cannot be loaded: .*more"):
        made.load(more)
    assert made.load(more, planner=DefaultLoadPlanner(allow_partial_load=True)).step == 2
    assert more["step"] == 2


def test_process_without_rank_saves_without_a_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "MUSTER_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for saved in range(2):
        with no_child_left():
            made = Checkpointer(tmp_path, keep_last=2)
            found = made.resume(state(0))
            assert (0 if found is None else found.step) == saved
            save_steps(made, saved + 1)
            made.close()


def test_a_plan_that_has_not_changed_is_not_made_again(
    made: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made.save(1, state(1))
    with monkeypatch.context() as patched:
        patched.setattr(Plans, "changed", raising(AssertionError, "planned again"))
        made.save(2, state(2))
        assert made.finalize(blocking=True) == [1, 2]
    larger = state(3) | {"more": torch.ones(5)}
    made.save(3, larger)
    assert made.finalize(blocking=True) == [3]
    assert sorted(path.name for path in (tmp_path / "step-0000000003").iterdir()) == FILES
    into = state(0) | {"more": torch.zeros(5)}
    made.load(into)
    assert torch.equal(into["more"], torch.ones(5))
    assert loaded(made, tmp_path / "step-0000000002") == (2, 2)


def test_the_child_asks_for_no_gpu(made: Checkpointer, monkeypatch: pytest.MonkeyPatch):
    """There torch's writer, left to itself, would ask for the current stream."""
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        made.save(1, state(1))
    assert made.finalize(blocking=True) == [1]


def test_steps_are_whole_numbers(made: Checkpointer):
    with pytest.raises(TypeError):
        made.save(1.0, state(1))  # type: ignore[arg-type]
    made.save(torch.tensor(1), state(1))  # type: ignore[arg-type]
    assert made.finalize(blocking=True) == [1]
    assert loaded(made) == (1, 1)
