"""Torch's own save and load through the committed writer and reader, in one process."""

import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.planner import LoadPlan

from muster.checkpoint.committed import MARKER, SEAL, UncommittedError
from muster.checkpoint.damage import DAMAGED, CorruptCheckpointError, Damage
from muster.checkpoint.manifest import MANIFEST, Manifest
from muster.worker.integrations import checkpoint as module
from muster.worker.integrations.checkpoint import CommittedReader, CommittedWriter, latest
from muster.worker.integrations.commit.lookup import REPLACED
from muster.worker.saves import Checkpointer
from tests.support.crashes.stat_faults import StatFaults
from tests.support.expect import raising
from tests.support.jobs import alone
from tests.support.saves.damage import flip
from tests.support.saves.synced import Synced
from tests.unit.worker.integrations.commit.folder_jobs import names

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Alone(alone.Alone):
    """The barrier of a job of one rank."""

    prefix = "checkpoint/dcp"
    participants: tuple[int, ...] = ()


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, saves_end_with_their_test: None) -> None:
    monkeypatch.setattr(Alone, "sequence", 0)
    monkeypatch.setattr(module, "job_barrier", Alone)


def state(value: float = 0.0) -> dict[str, Any]:
    return {"weights": torch.full((100,), value), "step": torch.tensor(int(value))}


def loaded(path: Path) -> float:
    found = state()
    dcp.load(found, storage_reader=CommittedReader(path))
    return float(found["weights"][0])


def refused(path: Path, caplog: pytest.LogCaptureFixture) -> str:
    """What the error of a load says, and the log: torch 2.9 and 2.10 leave out why there is no metadata."""
    caplog.clear()
    with pytest.raises(dcp.CheckpointException) as error:
        loaded(path)
    return f"{error.value}\n{caplog.text}"


def test_saved_checkpoint_is_loaded_and_its_name_can_be_reused(tmp_path: Path):
    path = tmp_path / "last"
    for value in (1.0, 2.0):
        dcp.save(state(value), storage_writer=CommittedWriter(path))
        metadata = CommittedReader(path).read_metadata()
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
    with monkeypatch.context() as patched:
        patched.setattr(FileSystemWriter, method, raising(OSError, 28, "No space left on device"))
        with pytest.raises(dcp.CheckpointException, match="No space left"):
            dcp.save(state(2.0), storage_writer=CommittedWriter(path))
    assert loaded(path) == 1.0
    dcp.save(state(3.0), storage_writer=CommittedWriter(path))
    assert loaded(path) == 3.0
    assert names(tmp_path) == {"last"}


def test_uncommitted_checkpoint_is_not_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "last"
    dcp.save(state(1.0), checkpoint_id=path)
    assert "is not a committed checkpoint" in refused(path, caplog)
    assert "is not a committed checkpoint" in caplog.text
    with pytest.raises(UncommittedError, match="is not a committed checkpoint"):
        CommittedReader(path).read_metadata()


def test_load_fails_if_the_checkpoint_is_replaced_meanwhile(tmp_path: Path):
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


def test_writer_without_file_sync_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="sync_files=False"):
        CommittedWriter(tmp_path / "last", sync_files=False)


def test_bad_terms_are_refused_at_construction(tmp_path: Path):
    mode: Any = "end"
    with pytest.raises(ValueError, match="on_lost = 'end'"):
        CommittedWriter(tmp_path / "last", on_lost=mode)
    with pytest.raises(ValueError, match="timeout = 0"):
        CommittedWriter(tmp_path / "last", timeout=0)


def test_a_failed_save_of_another_name_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.setattr(FileSystemWriter, "_write_data", raising(OSError, 28, "No space left on device"))
        with pytest.raises(dcp.CheckpointException, match="No space left"):
            dcp.save(state(1.0), storage_writer=CommittedWriter(tmp_path / "step-1"))
    dcp.save(state(2.0), storage_writer=CommittedWriter(tmp_path / "step-2"))
    assert names(tmp_path) == {"step-2"}


def test_a_name_that_is_taken_is_kept_if_it_is_to_be(tmp_path: Path):
    path = tmp_path / "last"
    dcp.save(state(1.0), storage_writer=CommittedWriter(path))
    with pytest.raises(dcp.CheckpointException, match=r"Checkpoint already exists and self.overwrite=False"):
        dcp.save(state(2.0), storage_writer=CommittedWriter(path, overwrite=False))
    assert loaded(path) == 1.0


@pytest.mark.parametrize("writer", [FileSystemWriter, CommittedWriter])
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_it_overwrites_and_refuses_to_as_torchs_writer_does(tmp_path: Path, writer: type[FileSystemWriter]):
    """As torch's test of ``overwrite``; the folder is there, and empty."""
    dcp.save(state(1.0), storage_writer=writer(tmp_path / "last", overwrite=False))
    (tmp_path / "empty").mkdir()
    dcp.save(state(1.0), storage_writer=writer(tmp_path / "empty", overwrite=False))
    dcp.save(state(2.0), storage_writer=writer(tmp_path / "last", overwrite=True))
    found = state()
    dcp.load(found, checkpoint_id=tmp_path / "last")
    assert float(found["weights"][0]) == 2.0
    with pytest.raises(dcp.CheckpointException, match=r".*Checkpoint already exists.*"):
        dcp.save(state(3.0), storage_writer=writer(tmp_path / "last", overwrite=False))


def test_name_that_cannot_be_looked_at_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "theirs"
    dcp.save(state(1.0), storage_writer=FileSystemWriter(path))
    with monkeypatch.context() as patched:
        StatFaults(patched, path / ".metadata", links_only=True)
        with pytest.raises(dcp.CheckpointException, match="Input/output error"):
            dcp.save(state(2.0), storage_writer=CommittedWriter(path, overwrite=False))
    assert names(tmp_path) == {"theirs"}
    found = state()
    dcp.load(found, checkpoint_id=path)
    assert float(found["weights"][0]) == 1.0


def test_checkpoint_with_an_interrupted_replacement_is_kept_without_overwrite(tmp_path: Path):
    path = tmp_path / "last"
    dcp.save(state(1.0), storage_writer=CommittedWriter(path))
    path.rename(tmp_path / f".last{REPLACED}")
    with pytest.raises(dcp.CheckpointException, match="Checkpoint already exists"):
        dcp.save(state(2.0), storage_writer=CommittedWriter(path, overwrite=False))
    assert loaded(path) == 1.0


def test_a_file_is_not_replaced_by_a_checkpoint(tmp_path: Path):
    (tmp_path / "last").write_text("precious")
    with pytest.raises(dcp.CheckpointException, match="last is a file: it is not replaced"):
        dcp.save(state(1.0), storage_writer=CommittedWriter(tmp_path / "last"))
    assert (tmp_path / "last").read_text() == "precious"


def test_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path):
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


def test_some_ranks_may_save_without_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Alone, "world_size", 4)
    monkeypatch.setattr(Alone, "participants", (0,))
    dcp.save(state(1.0), storage_writer=CommittedWriter(tmp_path / "last"))
    assert loaded(tmp_path / "last") == 1.0


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


# ---------------------------------------------------------------------- on the disk


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    synced = Synced.record(monkeypatch)
    path = tmp_path / "new" / "folders" / "last"
    dcp.save(state(1.0), storage_writer=CommittedWriter(path))
    synced.check_committed(path)
    for folder in (path.parent, path.parent.parent):
        synced.check_made(folder)


def test_a_part_that_a_thread_of_torchs_did_not_write_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    theirs = CommittedWriter._write_data

    def losing(self: CommittedWriter, *arguments: Any) -> Any:
        written: Any = theirs(self, *arguments)
        written.wait().pop()
        return written

    monkeypatch.setattr(CommittedWriter, "_write_data", losing)
    with pytest.raises(
        dcp.CheckpointException, match="was not written: a thread of torch's writer has failed"
    ):
        dcp.save(state(1.0), storage_writer=CommittedWriter(tmp_path / "last"))
    assert names(tmp_path) <= {".last.0-0-fbd8e0f8"}


# ---------------------------------------------------------------------- what is damaged afterwards


def manifest_in(path: Path) -> Manifest:
    return Manifest.decode((path / MANIFEST).read_bytes())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"thread_count": 2},
        {"single_file_per_rank": False},
        {"serialization_format": SerializationFormat.SAFETENSORS},
    ],
)
def test_the_manifest_names_every_file_as_it_is(tmp_path: Path, options: dict[str, Any]):
    path = tmp_path / "last"
    dcp.save(state(1.0), storage_writer=CommittedWriter(path, **options))
    files = manifest_in(path).files
    assert {name: entry.size for name, entry in files.items()} == {
        file.name: file.stat().st_size for file in path.iterdir() if file.name not in (MARKER, MANIFEST)
    }
    if "serialization_format" not in options:
        assert loaded(path) == 1.0
    assert [one.rank for one in manifest_in(path).ranks] == [0]


def test_a_format_that_is_not_torchs_is_not_taken_for_damage(tmp_path: Path):
    path = tmp_path / "last"
    writer = CommittedWriter(path, serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(state(1.0), storage_writer=writer)
    with pytest.raises(dcp.CheckpointException) as raised:
        loaded(path)
    assert not isinstance(raised.value.failures[0][0], CorruptCheckpointError), "torch cannot read it either"
    assert latest(tmp_path) == path


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda path: flip(path / "__0_0.distcp", 700),
    "a file that is cut": lambda path: (path / "__0_0.distcp").write_bytes(
        (path / "__0_0.distcp").read_bytes()[:-1]
    ),
    "a file that is longer": lambda path: (path / "__0_0.distcp").write_bytes(
        (path / "__0_0.distcp").read_bytes() + b"x"
    ),
    "a file that is missing": lambda path: (path / "__0_0.distcp").unlink(),
    "the metadata": lambda path: flip(path / ".metadata", 40),
    "the manifest": lambda path: flip(path / MANIFEST, 40),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_not_loaded_and_is_skipped_afterwards(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
):
    older, path = tmp_path / "step-1", tmp_path / "step-2"
    dcp.save(state(1.0), storage_writer=CommittedWriter(older))
    dcp.save(state(2.0), storage_writer=CommittedWriter(path))
    DAMAGES[damage](path)
    assert re.search(r"step-2 is damaged: .* \(found by rank 0 on ", refused(path, caplog))
    assert Damage.decode((path / DAMAGED).read_bytes()).rank == 0
    assert "step-2 is damaged" in refused(path, caplog)
    assert latest(tmp_path) == older
    assert loaded(older) == 1.0
    dcp.save(state(3.0), storage_writer=CommittedWriter(path))
    assert latest(tmp_path) == path, "it may be saved again"


def test_a_marker_that_is_damaged_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "step-1"
    dcp.save(state(1.0), storage_writer=CommittedWriter(path))
    said = json.loads((path / MARKER).read_text())
    (path / MARKER).write_text(json.dumps(said | {"world_size": 7}))
    assert "does not agree with its digest" in refused(path, caplog)
    with pytest.raises(CorruptCheckpointError, match=r"all committed checkpoints are damaged: .*step-1"):
        latest(tmp_path)


def test_a_checkpoint_that_took_anothers_name_is_not_marked(tmp_path: Path):
    path = tmp_path / "last"
    dcp.save(state(1.0), storage_writer=CommittedWriter(path))
    reader = CommittedReader(path)
    theirs = reader._read

    def replaced(item: Any, buffer: memoryview) -> None:
        dcp.save({"weights": torch.rand(100)}, storage_writer=CommittedWriter(path))
        theirs(item, buffer)

    reader._read = replaced  # type: ignore[method-assign]
    with pytest.raises(dcp.CheckpointException, match="last was replaced while it was loaded"):
        dcp.load(state(), storage_reader=reader)
    assert latest(tmp_path) == path


def test_a_checkpoint_of_an_earlier_version_is_loaded_unverified(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "last"
    dcp.save(state(1.0), storage_writer=CommittedWriter(path))
    said = json.loads((path / MARKER).read_text())
    del said[SEAL], said["manifest"]
    (path / MARKER).write_text(json.dumps(said))
    (path / MANIFEST).unlink()
    assert loaded(path) == 1.0
    assert caplog.text.count("last has no digests: it is loaded unverified") == 1


# ---------------------------------------------------------------------- beside Checkpointer


@pytest.fixture
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook: no launcher, and no coordinator."""
    monkeypatch.undo()
    for name in ("RANK", "WORLD_SIZE", "MUSTER_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_job")
def test_a_process_alone_saves_without_a_coordinator(tmp_path: Path):
    for value in (1.0, 2.0):
        dcp.save(state(value), storage_writer=CommittedWriter(tmp_path / "last"))
    assert loaded(tmp_path / "last") == 2.0
    assert names(tmp_path) == {"last"}


@pytest.mark.usefixtures("_no_job")
def test_a_step_of_a_checkpointer_is_read_and_its_damage_found(tmp_path: Path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(7, state(7.0))
    checkpointer.finalize(blocking=True)
    checkpointer.close()
    path = latest(tmp_path)
    assert path is not None
    assert loaded(path) == 7.0
    flip(path / "__0_0.distcp", 700)
    with pytest.raises(dcp.CheckpointException, match=f"{path.name} is damaged"):
        loaded(path)


@pytest.mark.usefixtures("_no_job")
def test_a_checkpointer_reads_it_and_finds_its_damage(tmp_path: Path):
    path = tmp_path / "by-dcp" / "last-12"
    dcp.save(state(1.0), storage_writer=CommittedWriter(path))
    checkpointer = Checkpointer(tmp_path / "steps")
    found = state()
    committed = checkpointer.load(found, path)
    assert (float(found["weights"][0]), committed.step, committed.world_size) == (1.0, 12, 1)
    flip(path / "__0_0.distcp", 700)
    with pytest.raises(CorruptCheckpointError, match=r"__0_0.distcp"):
        checkpointer.load(state(), path)
    with pytest.raises(CorruptCheckpointError, match="all committed checkpoints are damaged"):
        latest(path.parent)
    checkpointer.close()
