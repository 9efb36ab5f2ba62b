"""Saves for which a node has no room: they go to shared storage, on all ranks."""

import errno
import shutil
import socket
from pathlib import Path

import pytest

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.digest import digest_of
from muster.checkpoint.directory import CheckpointDirectory
from muster.checkpoint.manifest import Manifest
from muster.checkpoint.source import FolderSource
from muster.checkpoint.verification import verify
from muster.worker.errors import AsyncSaveError
from muster.worker.saves.local import local_storage, room
from muster.worker.saves.storage.folder_storage import PendingFolder, StepWriter
from tests.support.expect import raising
from tests.unit.worker.saves.local.conftest import LocalJob, state


def full_node(job: LocalJob, monkeypatch: pytest.MonkeyPatch, *ranks: int) -> None:
    """The disks of these ranks' nodes are full."""
    full = [job.nodes[rank].folder.path for rank in ranks]
    usage = shutil.disk_usage

    def seen(path: Path) -> object:
        found = usage(path)
        return found._replace(free=100) if any(Path(path).is_relative_to(one) for one in full) else found

    monkeypatch.setattr(shutil, "disk_usage", seen)


def in_shared(job: LocalJob, step: int) -> Path:
    """The checkpoint of a step in shared storage, which is whole."""
    path = job.shared / f"step-{step:010}"
    manifest = Manifest.decode((path / "manifest.json").read_bytes())
    assert not any(one.damages for one in verify(FolderSource(path), manifest, 1))
    assert {name for name in manifest.files} == {".metadata", *(f"__{rank}_0.distcp" for rank in range(3))}
    return path


@pytest.mark.parametrize("ranks", [(0,), (2,), (0, 1, 2)])
def test_save_without_room_on_a_node_goes_to_shared_storage(
    job: LocalJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ranks: tuple[int, ...]
):
    job.begin(persist_every=10).save(1)
    with monkeypatch.context() as patched:
        full_node(job, patched, *ranks)
        job.save(2)
    path = in_shared(job, 2)
    assert job.cluster.shared == {SaveAttempt(0, 1): str(path)}
    permit, commit = job.service.requests[1:]
    assert (permit.keeper_id, permit.persisted_as, commit.persisted_as) == ("", "", str(path))
    assert (commit.checkpoint.step, commit.checkpoint.persist_to) == (2, str(job.shared))
    manifest = (path / "manifest.json").read_bytes()
    assert commit.checkpoint.manifest_digest == digest_of(manifest)
    left = [one for rank in range(3) for one in job.nodes[rank].folder.attempt(SaveAttempt(0, 1)).glob("__*")]
    assert not left, "the parts on the nodes are of no use"
    warnings = [one.getMessage() for one in caplog.records if "had no room" in one.getMessage()]
    folder = job.nodes[ranks[0]].folder.attempt(SaveAttempt(0, 1))
    said = (
        f"rank {ranks[0]} ({socket.gethostname()}): the local copy takes 0.00 GiB, and {folder} has 0.00 GiB"
    )
    assert any(said in warning for warning in warnings)
    job.save(3)
    assert job.service.requests[-1].keeper_id == "keeper-0", "there is room again"


def test_disk_that_is_full_while_a_part_is_written_leads_to_shared_storage(
    job: LocalJob, monkeypatch: pytest.MonkeyPatch
):
    job.begin(persist_every=10).save(1)
    write = StepWriter.write_data

    def fill(self: StepWriter, *arguments: object) -> object:
        if str(self.checkpoint_id).startswith(str(job.nodes[1].folder.path)):
            (Path(self.checkpoint_id) / "__1_0.distcp").write_bytes(b"half")
            try:
                raise OSError(errno.ENOSPC, "No space left on device")
            finally:
                raise RuntimeError("unexpected pos")
        return write(self, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(StepWriter, "write_data", fill)
        job.save(2)
    in_shared(job, 2)
    job.save(3)


def test_plan_of_a_node_without_any_room_goes_through_shared_storage(
    job: LocalJob, monkeypatch: pytest.MonkeyPatch
):
    """Its first save: not even a note fits."""
    job.begin(persist_every=10)
    full = job.nodes[2].folder.path
    mkdir = Path.mkdir

    def no_room(self: Path, *arguments: object, **options: object) -> None:
        if self.is_relative_to(full):
            raise OSError(errno.ENOSPC, "No space left on device")
        mkdir(self, *arguments, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", no_room)
        job.save(1)
    in_shared(job, 1)


def test_commit_without_room_fails_the_save_and_the_next_goes_to_shared_storage(
    job: LocalJob, monkeypatch: pytest.MonkeyPatch
):
    job.begin(persist_every=10)
    with monkeypatch.context() as patched:
        patched.setattr(
            local_storage, "write_synced", raising(OSError, errno.ENOSPC, "No space left on device")
        )
        assert job.all(lambda one, rank: one.save(1, state(1, rank))) == [None] * 3
        failed = job.finalize()
    assert [type(one) for one in failed] == [AsyncSaveError] * 3
    assert "No space left" in str(failed[1])
    job.save(2)
    in_shared(job, 2)
    job.save(3)
    assert job.service.requests[-1].keeper_id == "keeper-0", "the disk is tried again"


def test_save_fails_by_name_if_a_rank_cannot_bring_its_part_to_shared_storage(
    job: LocalJob, monkeypatch: pytest.MonkeyPatch
):
    job.begin(persist_every=10).save(1)
    with monkeypatch.context() as patched:
        full_node(job, patched, 2)
        patched.setattr(PendingFolder, "copy", raising(OSError, "the share is read-only"))
        assert job.all(lambda one, rank: one.save(2, state(2, rank))) == [None] * 3
        failed = job.finalize()
    assert [type(one) for one in failed] == [AsyncSaveError] * 3
    assert all("read-only" in str(one) for one in failed)
    job.save(3)
    assert job.resume() == [3] * 3


def test_older_checkpoints_are_settled_before_one_is_committed_in_shared_storage(
    job: LocalJob, monkeypatch: pytest.MonkeyPatch
):
    """A keeper was permitted to commit one, and has not."""
    job.begin(persist_every=10).save(1)
    job.cluster.unsettled = [job.service.requests[0].checkpoint]
    unfinished = CheckpointDirectory(job.shared, "job").unfinished(1, SaveAttempt(0, 0))
    unfinished.mkdir()
    full_node(job, monkeypatch, 1)
    job.save(2)
    in_shared(job, 2)
    assert not unfinished.exists(), "its keeper cannot commit it any more"


def test_folder_in_memory_counts_for_the_memory_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "file_system_of", lambda _: "tmpfs")
    monkeypatch.setattr(room, "available_memory", lambda: 1000)
    room.check_room(tmp_path, 900)
    with pytest.raises(MemoryError, match="is in memory"):
        room.check_room(tmp_path, 901)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(MemoryError, match="for each of this node's 2 ranks"):
        room.check_room(tmp_path, 500)
