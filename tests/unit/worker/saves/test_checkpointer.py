"""Checkpoints of one rank: begun, committed, found, loaded, swept."""

import errno
import json
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from lab.patience import PATIENCE, until
from muster.checkpoint import retry
from muster.checkpoint.committed import UncommittedError
from muster.worker.decision import Decision
from muster.worker.errors import AsyncSaveError, ConnectError, MusterError
from muster.worker.saves import Checkpointer, CorruptCheckpointError, SaveTimings
from muster.worker.saves import checkpointer as module
from muster.worker.saves.memory import staging
from muster.worker.saves.planning import planning
from muster.worker.saves.planning.planning import CHANGED
from muster.worker.saves.planning.plans import Plans
from muster.worker.saves.storage.folder_storage import PendingFolder
from tests.support.meeting import in_thread
from tests.support.saves.fake_barrier import FakeBarrier, no_child_left
from tests.support.saves.round_table import RoundTable

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


FILES = [".metadata", "__0_0.distcp", "committed.json", "manifest.json"]


@pytest.fixture
def barrier() -> FakeBarrier:
    return FakeBarrier()


@pytest.fixture
def made(tmp_path: Path, barrier: FakeBarrier) -> Iterator[Checkpointer]:
    with no_child_left():
        one = Checkpointer(tmp_path, barrier=barrier, timeout=30)  # type: ignore[arg-type]
        yield one
        one.close()


def state(value: float) -> dict[str, Any]:
    value = float(value)
    return {"model": {"weight": torch.full((1000,), value), "bias": torch.full((3,), value)}, "step": value}


def loaded(made: Checkpointer, path: Path | None = None) -> tuple[int, float]:
    into = state(-7)
    found = made.load(into, path)
    weight = into["model"]["weight"]
    assert torch.equal(weight, torch.full((1000,), into["step"]))
    return found.step, into["step"]


def when_written(patched: pytest.MonkeyPatch, what: Callable[[Path], object]) -> None:
    """What happens in a child that has written, in the folder of the save."""
    leave = PendingFolder.leave

    def leave_and_more(self: PendingFolder, note: str, data: bytes) -> None:
        leave(self, note, data)
        if note.startswith("written"):
            what(self._unfinished)

    patched.setattr(PendingFolder, "leave", leave_and_more)


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


def test_a_killed_child_commits_nothing_and_the_next_save_does(
    made: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made.save(1, state(1))
    assert made.finalize(blocking=True) == [1]
    with monkeypatch.context() as patched:
        when_written(patched, lambda _: os.kill(os.getpid(), signal.SIGKILL))
        made.save(2, state(2))
    with pytest.raises(AsyncSaveError, match="SIGKILL"):
        made.finalize(blocking=True)
    assert loaded(made) == (1, 1)
    made.save(2, state(2.5))
    assert made.finalize(blocking=True) == [2]
    assert loaded(made) == (2, 2.5)
    made.close()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_is_not_committed_is_not_loaded(
    made: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Not even complete data."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with monkeypatch.context() as patched:
        when_written(patched, lambda _: gate.read_text())
        made.save(1, state(1))
    with gate.open("w"):  # Opens when the child has written and reads.
        (unfinished,) = tmp_path.glob(".step-*")
        with pytest.raises(UncommittedError, match="is not a committed checkpoint"):
            made.load(state(0), unfinished)
        assert made.latest() is None
    assert made.finalize(blocking=True) == [1]


def test_a_disk_that_takes_no_more_fails_the_save(made: Checkpointer, tmp_path: Path):
    """Here the limit is the process's, which a child has from its parent."""
    made.save(1, state(1))
    assert made.finalize(blocking=True) == [1]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        made.save(2, state(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(AsyncSaveError, match="File too large"):
        made.finalize(blocking=True)
    assert loaded(made) == (1, 1)


def test_the_last_ones_are_kept(tmp_path: Path, barrier: FakeBarrier):
    heard: list[SaveTimings] = []
    made = Checkpointer(tmp_path, keep_last=2, barrier=barrier, on_saved=heard.append)  # type: ignore[arg-type]
    for step in range(5):
        made.save(step, state(step))
    made.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000000003", "step-0000000004"]
    assert [one.call_idx for one in heard] == [0, 1, 2, 3, 4]


def test_leftovers_of_another_life_are_swept_at_the_start(tmp_path: Path, barrier: FakeBarrier):
    (tmp_path / ".step-0000000001.0-0").mkdir()
    (tmp_path / ".removed-step-0000000001").mkdir()
    Checkpointer(tmp_path, barrier=barrier).close()  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_what_other_ranks_have_begun_to_write_is_not_swept(made: Checkpointer, tmp_path: Path):
    """They may be ahead: their children write the next save while this rank still commits the last one."""
    theirs = tmp_path / f".step-0000000002.0-1-{crc32(b'job'):08x}"
    theirs.mkdir()
    (theirs / "__1_0.distcp").touch()
    made.save(1, state(1))
    assert made.finalize(blocking=True) == [1]
    assert [path.name for path in theirs.iterdir()] == ["__1_0.distcp"]


def test_bad_steps_are_refused(made: Checkpointer):
    with pytest.raises(ValueError, match="negative"):
        made.save(-1, state(0))
    made.save(1, state(1))
    with pytest.raises(ValueError, match=r"being saved already|committed already"):
        made.save(1, state(1))
    # Another rank may have seen it otherwise: it counts, and has failed for all.
    with pytest.raises(AsyncSaveError, match="step 1 was not committed") as caught:
        made.finalize(blocking=True)
    assert caught.value.finalized == (1,)
    with pytest.raises(ValueError, match="committed already"):
        made.save(1, state(1))
    with pytest.raises(AsyncSaveError) as caught:
        made.finalize(blocking=True)
    assert caught.value.finalized == ()
    made.save(2, state(2))
    assert made.finalize(blocking=True) == [2]


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


def test_resume_returns_none_without_a_checkpoint(made: Checkpointer):
    assert made.resume(state(0)) is None


def save_steps(made: Checkpointer, *steps: int) -> None:
    for step in steps:
        made.save(step, state(step))
    assert made.finalize(blocking=True) == list(steps)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json", "committed.json"])
@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_resume_steps_down_from_a_damaged_checkpoint_for_good(
    made: Checkpointer, tmp_path: Path, barrier: FakeBarrier, name: str, how: str
):
    save_steps(made, 1, 2, 3)
    hurt(tmp_path / "step-0000000003" / name, how)
    into = state(-7)
    found = made.resume(into)
    assert found is not None
    assert (found.step, into["step"]) == (2, 2.0)
    assert torch.equal(into["model"]["weight"], torch.full((1000,), 2.0))
    # The next life does not look at it again, and can save the step anew.
    latest = made.latest()
    assert latest is not None
    assert latest.step == 2
    made.save(3, state(3.5))
    assert made.finalize(blocking=True) == [3]
    assert loaded(made) == (3, 3.5)


def hurt(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if how == "truncated":
        del data[-1]
    else:
        data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_resume_raises_if_every_checkpoint_is_damaged(made: Checkpointer, tmp_path: Path):
    save_steps(made, 1, 2)
    for step in (1, 2):
        hurt(tmp_path / f"step-{step:010}" / "__0_0.distcp", "flipped")
    for _ in range(2):  # Also when all are marked.
        with pytest.raises(
            CorruptCheckpointError, match=r"step-0000000002: __0_0.distcp at offset \d+: .* bytes"
        ):
            made.resume(state(0))


def test_partial_load_does_not_mix_two_checkpoints(made: Checkpointer, tmp_path: Path):
    """What the older checkpoint does not have would stay as the damaged one had it."""
    save_steps(made, 1)
    made.save(2, state(2) | {"more": torch.ones(3)})
    assert made.finalize(blocking=True) == [2]
    hurt(tmp_path / "step-0000000002" / "__0_0.distcp", "flipped")
    planner = DefaultLoadPlanner(allow_partial_load=True)
    with pytest.raises(CorruptCheckpointError, match="Build the state again, and call resume"):
        made.resume(state(0) | {"more": torch.zeros(3)}, planner=planner)
    into = state(0) | {"more": torch.zeros(3)}
    found = made.resume(into, planner=planner)
    assert found is not None
    assert (found.step, into["more"].sum()) == (1, 0)


def test_load_of_a_named_checkpoint_does_not_step_down(made: Checkpointer, tmp_path: Path):
    save_steps(made, 1, 2)
    path = tmp_path / "step-0000000002"
    hurt(path / "__0_0.distcp", "flipped")
    for _ in range(2):
        with pytest.raises(CorruptCheckpointError, match=r"__0_0.distcp at offset"):
            made.load(state(0), path)
    assert loaded(made) == (1, 1)


def test_verify_off_loads_what_is_there(tmp_path: Path, barrier: FakeBarrier):
    made = Checkpointer(tmp_path, verify="off", barrier=barrier)  # type: ignore[arg-type]
    save_steps(made, 1)
    hurt(tmp_path / "step-0000000001" / "manifest.json", "missing")
    assert loaded(made) == (1, 1)
    made.close()


def test_verify_of_another_value_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="verify = 'on'"):
        Checkpointer(tmp_path, verify="on", barrier=FakeBarrier())  # type: ignore[arg-type]


def test_checkpoint_without_digests_loads_with_a_warning(
    made: Checkpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """As 0.1.0 wrote them."""
    save_steps(made, 1)
    folder = tmp_path / "step-0000000001"
    (folder / "manifest.json").unlink()
    fields = {"step": 1, "world_size": 1, "run_id": "job", "prefix": "save", "sequence": 0}
    (folder / "committed.json").write_text(json.dumps(fields))
    assert loaded(made) == (1, 1)
    assert "it is loaded unverified" in caplog.text
    save_steps(made, 2)
    assert loaded(made) == (2, 2)


def test_first_read_that_fails_on_its_way_is_no_damage(
    made: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save_steps(made, 1)
    preadv = os.preadv
    reads: list[int] = []

    def once_wrong(handle: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(handle, buffers, offset)
        reads.append(count)
        if len(reads) == 1:
            buffers[0][0] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", once_wrong)
    assert loaded(made) == (1, 1)
    assert not list(tmp_path.glob("*/.damaged.json"))


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("where", ["the marker", "the listing", "an item"])
def test_io_error_is_raised_and_never_taken_for_absence(
    made: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, where: str
):
    save_steps(made, 1, 2)
    monkeypatch.setattr(retry, "DELAYS", (0.0,))
    fault = OSError(error, os.strerror(error))

    def failing(owner: Any, name: str, concerns: Callable[..., bool]) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if concerns(*arguments):
                raise fault
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    if where == "the marker":
        failing(Path, "read_bytes", lambda path: path == tmp_path / "step-0000000002" / "committed.json")
    elif where == "the listing":
        failing(Path, "iterdir", lambda path: path == tmp_path)
    else:
        failing(os, "preadv", lambda *_: True)
    with pytest.raises((OSError, RuntimeError), match=re.escape(os.strerror(error))):
        made.resume(state(0))
    assert not list(tmp_path.glob("*/.damaged.json"))


def test_retention_follows_the_order_of_commits(tmp_path: Path, barrier: FakeBarrier):
    made = Checkpointer(tmp_path, keep_last=3, barrier=barrier)  # type: ignore[arg-type]
    save_steps(made, 80, 90, 100)
    assert made.load(state(0), tmp_path / "step-0000000080").step == 80
    save_steps(made, 60)
    made.close()
    assert sorted(int(path.name[5:]) for path in tmp_path.iterdir()) == [60, 90, 100]
    latest = made.latest()
    assert latest is not None
    assert latest.step == 60


def test_retention_counts_whole_checkpoints_only(tmp_path: Path, barrier: FakeBarrier):
    made = Checkpointer(tmp_path, keep_last=2, barrier=barrier)  # type: ignore[arg-type]
    save_steps(made, 1, 2, 3)
    hurt(tmp_path / "step-0000000003" / "__0_0.distcp", "flipped")
    assert made.load(state(0)).step == 2
    save_steps(made, 4)
    assert sorted(int(path.name[5:]) for path in tmp_path.iterdir()) == [2, 3, 4]
    save_steps(made, 5)
    made.close()
    assert sorted(int(path.name[5:]) for path in tmp_path.iterdir()) == [4, 5]


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


def test_barrier_of_some_ranks_is_refused(tmp_path: Path):
    barrier = FakeBarrier(world_size=2)
    barrier.participants = (0,)
    with pytest.raises(ValueError, match=r"has only ranks \[0\]"):
        Checkpointer(tmp_path, barrier=barrier)  # type: ignore[arg-type]


def test_process_without_rank_saves_without_a_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "MUSTER_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for life in range(2):
        with no_child_left():
            made = Checkpointer(tmp_path, keep_last=2)
            found = made.resume(state(0))
            assert (0 if found is None else found.step) == life
            save_steps(made, life + 1)
            made.close()


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_refused(keep: int, tmp_path: Path):
    with pytest.raises(ValueError, match="keep_last"):
        Checkpointer(tmp_path, keep_last=keep, barrier=FakeBarrier())  # type: ignore[arg-type]


def test_loading_nothing_says_so(made: Checkpointer):
    with pytest.raises(FileNotFoundError, match="holds no committed checkpoint"):
        made.load(state(0))


@pytest.mark.parametrize("copy", [True, False])
def test_a_state_that_is_too_large_for_a_copy_is_refused_before_the_fork(
    copy: bool, tmp_path: Path, barrier: FakeBarrier, monkeypatch: pytest.MonkeyPatch
):
    made = Checkpointer(tmp_path, copy=copy, barrier=barrier)  # type: ignore[arg-type]
    with monkeypatch.context() as patched:
        patched.setattr(staging, "available_memory", lambda: 4_000)
        with no_child_left(), pytest.raises(MemoryError, match="free memory"):
            made.save(1, state(1))
    with pytest.raises(AsyncSaveError, match="MemoryError"):
        made.finalize(blocking=True)
    made.save(1, state(1))
    assert made.finalize(blocking=True) == [1]
    made.close()


def test_a_plan_that_has_not_changed_is_not_made_again(
    made: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made.save(1, state(1))

    def again(*_: Any) -> None:
        raise AssertionError("planned again")

    with monkeypatch.context() as patched:
        patched.setattr(Plans, "changed", again)
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


def test_nothing_is_saved_after_closing(tmp_path: Path):
    made = Checkpointer(tmp_path, barrier=FakeBarrier())  # type: ignore[arg-type]
    made.close()
    with pytest.raises(MusterError, match="closed"):
        made.save(1, state(1))
    assert list(tmp_path.iterdir()) == []


def test_a_save_with_a_file_missing_is_not_committed(
    made: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    when_written(monkeypatch, lambda folder: os.truncate(folder / "__0_0.distcp", 10))
    made.save(1, state(1))
    with pytest.raises(AsyncSaveError, match="has 10 bytes"):
        made.finalize(blocking=True)
    assert made.latest() is None


def test_what_was_written_by_nobody_is_not_committed(made: Checkpointer, monkeypatch: pytest.MonkeyPatch):
    """Whatever the plans said: rank 0 looks at what was written."""
    finish = DefaultSavePlanner.finish_plan

    def less(self: DefaultSavePlanner, plan: SavePlan) -> SavePlan:
        return finish(self, replace(plan, items=plan.items[1:]))

    with monkeypatch.context() as patched:
        patched.setattr(DefaultSavePlanner, "finish_plan", less)
        made.save(1, state(1))
    with pytest.raises(AsyncSaveError, match="was written by no rank"):
        made.finalize(blocking=True)
    assert made.latest() is None
    made.save(1, state(1))
    assert made.finalize(blocking=True) == [1]


@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_plan_that_fails_counts(made: Checkpointer, monkeypatch: pytest.MonkeyPatch, error: BaseException):
    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(DefaultSavePlanner, "create_local_plan", fail)
        with pytest.raises(type(error)):
            made.save(1, state(1))
    assert made._queue.next_idx == 1
    with pytest.raises(AsyncSaveError):
        made.finalize(blocking=True)
    made.save(1, state(1))
    assert made.finalize(blocking=True) == [1]


@pytest.mark.parametrize("begun", [False, True], ids=["before", "after"])
def test_interrupt_when_a_plan_is_handed_in_keeps_nobody_waiting(
    made: Checkpointer, barrier: FakeBarrier, monkeypatch: pytest.MonkeyPatch, begun: bool
):
    """A save is begun or refused, and never both: else the next one would be another rank's this one."""
    negotiator = made._planning._negotiator
    put = negotiator.put

    def interrupt(negotiation: planning.PlanNegotiation) -> None:
        if begun:
            put(negotiation)
        monkeypatch.setattr(negotiator, "put", put)
        raise KeyboardInterrupt

    monkeypatch.setattr(negotiator, "put", interrupt)
    with pytest.raises(KeyboardInterrupt):
        made.save(1, state(1))
    with pytest.raises(AsyncSaveError):
        made.finalize(blocking=True)
    made.close()
    votes = barrier.siblings["save/plan"].votes
    # The save has failed, and may be swept before it is planned.
    assert (votes[0] is None) == begun
    assert len(votes) <= (3 if begun else 1)


def test_a_second_interrupt_does_not_keep_a_save_from_counting(
    made: Checkpointer, monkeypatch: pytest.MonkeyPatch
):
    """Who presses control and C twice, or is told to end twice."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(DefaultSavePlanner, "create_local_plan", interrupt)
        patched.setattr(made._planning, "refuse", interrupt)
        with pytest.raises(KeyboardInterrupt):
            made.save(1, state(1))
    assert made._queue.next_idx == 1
    with pytest.raises(AsyncSaveError):
        made.finalize(blocking=True)


@pytest.mark.parametrize("error", [OSError("stale"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("where", ["_check_new", "AsyncRequest"], ids=["before its plan", "after its plan"])
def test_wherever_a_save_fails_it_counts_once(
    made: Checkpointer,
    barrier: FakeBarrier,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    error: BaseException,
):
    """Else this rank's next save is the other ranks' one before."""

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(made if hasattr(made, where) else module, where, fail)
        with pytest.raises(type(error)):
            made.save(1, state(1))
    assert made._queue.next_idx == 1
    with pytest.raises(AsyncSaveError):
        made.finalize(blocking=True)
    made.save(1, state(1))
    assert made.finalize(blocking=True) == [1]
    made.close()
    plan = barrier.siblings["save/plan"]
    begun = [word == CHANGED for word in plan.said].count(True)
    refused = [why is not None for why in plan.votes].count(True)
    assert (begun, refused) == (1, 1 if where == "_check_new" else 0), "the second has the plan of the first"


def test_who_cannot_reach_the_coordinator_has_taken_nothing(
    tmp_path: Path, barrier: FakeBarrier, monkeypatch: pytest.MonkeyPatch
):
    sibling = barrier.sibling

    def fail(prefix: str) -> FakeBarrier:
        if prefix == "save/plan":
            raise ConnectError("nobody answers")
        return sibling(prefix)

    with monkeypatch.context() as patched:
        patched.setattr(barrier, "sibling", fail)
        with pytest.raises(ConnectError) as caught:
            Checkpointer(tmp_path, barrier=barrier)  # type: ignore[arg-type]
    assert caught.tb is not None, "who handles it holds what it has passed"
    Checkpointer(tmp_path, barrier=barrier).close()  # type: ignore[arg-type]


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


# ---------------------------------------------------------------------- several ranks


class Job:
    """Two ranks of one process.

    Args:
        folder: that they share.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table = RoundTable(2)
        self.ranks: list[Checkpointer] = []

    def rank(self, number: int) -> Checkpointer:
        made = Checkpointer(self.folder, barrier=self.table.seat(number), timeout=30)  # type: ignore[arg-type]
        self.ranks.append(made)
        return made

    def heard(self) -> list[list[int] | str]:
        """What each rank hears of its next save: steps, or why there are none."""
        heard: list[list[int] | str] = []
        for rank in self.ranks:
            try:
                heard.append(rank.finalize(blocking=True))
            except AsyncSaveError as error:
                heard.append(str(error))
        return heard


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(Checkpointer, "_check_group", lambda _: None)
    with no_child_left():
        made = Job(tmp_path)
        yield made
        for rank in made.ranks:
            rank.close()


def test_rank_0_may_begin_last(job: Job):
    """It sweeps when it begins."""
    one = job.rank(1)
    saved = in_thread(lambda: one.save(1, state(1)))
    until(lambda: job.table.has_arrived(1, "save/plan", 0))
    job.rank(0).save(1, state(1))
    saved.result()
    assert job.heard() == [[1], [1]]


def test_what_rank_0_could_not_begin_leaves_nothing(job: Job, monkeypatch: pytest.MonkeyPatch):
    """The others, whose state is as before, have written their part."""
    zero, one = job.rank(0), job.rank(1)
    saved = in_thread(lambda: one.save(1, state(1)))
    zero.save(1, state(1))
    saved.result()
    assert job.heard() == [[1], [1]]

    def fail(*_: Any) -> None:
        raise MemoryError("there is no room")

    with monkeypatch.context() as patched:
        patched.setattr(zero, "_stage", fail)
        for step in (2, 3):
            one.save(step, state(step))
            until(lambda: one._queue._loop.ledger.saves()[0][0].write._request is None)
            with pytest.raises(MemoryError):
                zero.save(step, state(step))
            assert all("rank 0 failed: MemoryError" in heard for heard in job.heard())
    zero.close()
    assert [path.name for path in job.folder.iterdir()] == ["step-0000000001"]


def test_a_save_that_has_failed_before_it_is_planned_here_is_no_error_of_this_rank(
    job: Job, monkeypatch: pytest.MonkeyPatch
):
    """Rank 0 has swept it, since a third one has failed."""
    zero, one = job.rank(0), job.rank(1)
    plan = one._planning._negotiator._barrier
    vote = plan.vote

    def late(*arguments: Any) -> Decision:
        decision = vote(*arguments)
        if plan.sequence == 3:
            next(job.folder.glob(".step-*/.ranks/share-1")).unlink()
        return decision

    monkeypatch.setattr(plan, "vote", late)
    saved = in_thread(lambda: zero.save(1, state(1)))
    one.save(1, state(1))
    saved.result()
    for heard in job.heard():
        assert "rank 1 failed: it was not planned: step 1 has failed on another rank" in heard


def test_who_makes_other_saves_is_named(job: Job):
    zero, one = job.rank(0), job.rank(1)
    saved = in_thread(lambda: one.save(1, state(1)))
    zero.save(1, state(1))
    saved.result()
    assert job.heard() == [[1], [1]]
    zero.save(2, state(2))
    one.save(3, state(3))
    for heard in job.heard():
        assert (
            "written-1, which another rank has written, is not there: all ranks must save the same" in heard
        )
    assert [path.name for path in job.folder.glob("step-*")] == ["step-0000000001"]


def test_ranks_that_torch_does_not_know_of_are_refused(tmp_path: Path):
    """Each would write the same file."""
    made = Checkpointer(tmp_path, barrier=FakeBarrier(world_size=2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="init_process_group"):
        made.save(1, state(1))
    made.close()


def test_nothing_committed_is_removed_before_it_is_known_to_be_whole(tmp_path: Path, barrier: FakeBarrier):
    """The process was killed between a commit and what it was to remove then; the newest is damaged now."""
    made = Checkpointer(tmp_path, keep_last=2, barrier=barrier)  # type: ignore[arg-type]
    save_steps(made, 1, 2)
    made.close()
    hurt(tmp_path / "step-0000000002" / "__0_0.distcp", "flipped")
    again = Checkpointer(tmp_path, keep_last=1, barrier=barrier)  # type: ignore[arg-type]
    assert again.load(state(0)).step == 1
    again.close()


def test_save_after_an_interrupted_close_is_refused(made: Checkpointer, monkeypatch: pytest.MonkeyPatch):
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    save_steps(made, 1)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(made._huge_pages, "saving", interrupt)
        with pytest.raises(KeyboardInterrupt):
            made.close()
    with pytest.raises(MusterError, match=r"its close\(\) was interrupted"):
        made.save(2, state(2))
    made.close()


def test_close_by_a_handler_that_interrupts_a_save_ends(made: Checkpointer, monkeypatch: pytest.MonkeyPatch):
    begin = planning.Planning.begin

    def interrupted(*args: Any, **options: Any) -> planning.PlanNegotiation:
        monkeypatch.setattr(planning.Planning, "begin", begin)
        made.close()
        return begin(*args, **options)

    made.save(1, state(1))
    monkeypatch.setattr(planning.Planning, "begin", interrupted)
    with pytest.raises(MusterError, match="closed"):
        in_thread(lambda: made.save(2, state(2) | {"more": torch.ones(3)})).result(PATIENCE)
    newest = made.latest()
    assert newest is not None
    assert newest.step == 1
