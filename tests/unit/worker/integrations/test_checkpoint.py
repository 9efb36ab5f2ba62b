"""Torch's own save and load through the committed writer and reader, in one process."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlan

from muster.checkpoint.committed import UncommittedError
from muster.worker.decision import Decision, Outcome
from muster.worker.integrations import checkpoint as module
from muster.worker.integrations import commitment
from muster.worker.integrations.checkpoint import CommittedReader, CommittedWriter, latest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Alone:
    """The barrier of a job of one rank."""

    prefix, rank, world_size, run_id, generation = "checkpoint/dcp", 0, 1, "job", 0
    sequence = 0

    def __init__(self, **_: object) -> None:
        """As the real one is made."""

    def vote(self, failure: str | None, timeout: float, payload: bytes, report: object = None) -> Decision:
        Alone.sequence += 1
        outcome = Outcome.RELEASED if failure is None else Outcome.ABORTED
        return Decision(self.prefix, Alone.sequence - 1, outcome, failure or "", payloads={0: payload})


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commitment, "_last", {})
    monkeypatch.setattr(commitment, "_highest", {})
    monkeypatch.setattr(Alone, "sequence", 0)
    monkeypatch.setattr(module, "GrpcBarrier", Alone)


def state(value: float = 0.0) -> dict[str, Any]:
    return {"weights": torch.full((100,), value), "step": torch.tensor(int(value))}


def loaded(path: Path) -> float:
    found = state()
    dcp.load(found, storage_reader=CommittedReader(path))
    return float(found["weights"][0])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_is_saved_is_loaded_and_the_name_can_be_used_again(tmp_path: Path):
    path = tmp_path / "last"
    for value in (1.0, 2.0):
        metadata = dcp.save(state(value), storage_writer=CommittedWriter(path))
        assert metadata.storage_meta is not None
        assert metadata.storage_meta.checkpoint_id == path
        assert loaded(path) == value
        assert latest(tmp_path) == path
    assert names(tmp_path) == {"last"}


def test_one_writer_may_save_one_after_the_other(tmp_path: Path):
    writer = CommittedWriter(tmp_path / "unused")
    for step in (1, 2):
        dcp.save(state(step), checkpoint_id=tmp_path / f"step-{step}", storage_writer=writer)
    assert names(tmp_path) == {"step-1", "step-2"}
    assert loaded(tmp_path / "step-1") == 1.0


def test_parts_of_different_saves_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As where a rank has left a save that another makes in a thread of its own."""
    dcp.save(state(1.0), storage_writer=CommittedWriter(tmp_path / "step-1"))
    monkeypatch.setattr(
        CommittedWriter, "prepare_local_plan", lambda _, plan: replace(plan, storage_data="step-1")
    )
    with pytest.raises(dcp.CheckpointException, match="rank 0 saves 'step-2', and rank 0 'step-1'"):
        dcp.save(state(2.0), storage_writer=CommittedWriter(tmp_path / "step-2"))
    assert names(tmp_path) == {"step-1"}


def test_it_saves_aside_as_well(tmp_path: Path):
    under_way: Any = dcp.async_save(state(3.0), storage_writer=CommittedWriter(tmp_path / "last"))
    under_way.result()
    assert loaded(tmp_path / "last") == 3.0


@pytest.mark.parametrize("method", ["prepare_global_plan", "_write_data", "finish"])
def test_a_save_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "last"
    dcp.save(state(1.0), storage_writer=CommittedWriter(path))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(FileSystemWriter, method, full)
        with pytest.raises(dcp.CheckpointException, match="No space left"):
            dcp.save(state(2.0), storage_writer=CommittedWriter(path))
    assert loaded(path) == 1.0
    dcp.save(state(3.0), storage_writer=CommittedWriter(path))
    assert loaded(path) == 3.0
    assert names(tmp_path) == {"last"}


def test_what_is_not_committed_is_not_loaded(tmp_path: Path):
    path = tmp_path / "last"
    dcp.save(state(1.0), checkpoint_id=path)
    with pytest.raises(dcp.CheckpointException, match="is not a committed checkpoint"):
        loaded(path)
    with pytest.raises(UncommittedError, match="is not a committed checkpoint"):
        CommittedReader(path).read_metadata()


def test_what_is_replaced_while_it_is_loaded_is_not_mixed(tmp_path: Path):
    path = tmp_path / "last"
    dcp.save(state(1.0), storage_writer=CommittedWriter(path))
    reader, other = CommittedReader(path), CommittedReader(path)
    metadata = reader.read_metadata()
    dcp.save(state(2.0), storage_writer=CommittedWriter(path))
    other.read_metadata()
    plans = [one.prepare_local_plan(LoadPlan([])) for one in (reader, other)]
    with pytest.raises(RuntimeError, match="last was replaced while it was loaded"):
        reader.prepare_global_plan(plans)
    reader.set_up_storage_reader(metadata, True)
    with pytest.raises(RuntimeError, match="last was replaced while it was loaded"):
        reader.read_data(LoadPlan([]), DefaultLoadPlanner())
    dcp.load(state(), checkpoint_id=path, storage_reader=reader)


def test_a_writer_that_is_told_of_another_name_writes_on_where_it_was(tmp_path: Path):
    writer = CommittedWriter(tmp_path / "a")
    dcp.save(state(1.0), storage_writer=writer)
    under_way = writer.path
    writer.reset(tmp_path / "b")
    assert writer.path == under_way
    assert writer.checkpoint_id == tmp_path / "b"


def test_what_is_not_on_the_disk_cannot_be_committed(tmp_path: Path):
    with pytest.raises(ValueError, match="sync_files=False"):
        CommittedWriter(tmp_path / "last", sync_files=False)


def test_a_failed_save_of_another_name_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(FileSystemWriter, "_write_data", full)
        with pytest.raises(dcp.CheckpointException, match="No space left"):
            dcp.save(state(1.0), storage_writer=CommittedWriter(tmp_path / "step-1"))
    dcp.save(state(2.0), storage_writer=CommittedWriter(tmp_path / "step-2"))
    assert names(tmp_path) == {"step-2"}


def test_a_name_that_is_taken_is_kept_if_it_is_to_be(tmp_path: Path):
    path = tmp_path / "last"
    dcp.save(state(1.0), storage_writer=CommittedWriter(path))
    with pytest.raises(dcp.CheckpointException, match="last is there, and overwrite=False"):
        dcp.save(state(2.0), storage_writer=CommittedWriter(path, overwrite=False))
    assert loaded(path) == 1.0


def test_what_is_no_checkpoint_is_not_replaced_by_one(tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").touch()
    with pytest.raises(
        dcp.CheckpointException, match="data is a folder, and no checkpoint: it is not replaced"
    ):
        dcp.save(state(1.0), storage_writer=CommittedWriter(tmp_path / "data"))
    assert (tmp_path / "data" / "precious").exists()
    dcp.save(state(1.0), checkpoint_id=tmp_path / "torchs")
    dcp.save(state(2.0), storage_writer=CommittedWriter(tmp_path / "torchs"))
    assert loaded(tmp_path / "torchs") == 2.0


def test_a_save_without_a_common_plan_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="use_collectives=False"):
        dcp.save(state(), storage_writer=CommittedWriter(tmp_path / "last"), use_collectives=False)


def test_ranks_that_are_not_the_barriers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Alone, "rank", 1)
    with pytest.raises(ValueError, match="is rank 1 of the barrier, and leads torch's save"):
        CommittedWriter(tmp_path / "last").set_up_storage_writer(True)


def test_it_goes_to_another_process_without_what_is_under_way_here(tmp_path: Path):
    writer = CommittedWriter(tmp_path / "last", timeout=5.0)
    dcp.save(state(1.0), storage_writer=writer)
    copied = pickle.loads(pickle.dumps(writer))
    assert (writer._prefix, copied._prefix) == ("checkpoint/dcp", "checkpoint/dcp-process")
    dcp.save(state(2.0), storage_writer=copied)
    assert loaded(tmp_path / "last") == 2.0
    own: Any = Alone()
    with pytest.raises(TypeError, match="barrier of its own"):
        pickle.dumps(CommittedWriter(tmp_path / "last", barrier=own))


def test_an_option_that_torch_does_not_have_is_an_error(tmp_path: Path):
    with pytest.raises(TypeError, match="colour"):
        CommittedWriter(tmp_path / "last", colour="red")
