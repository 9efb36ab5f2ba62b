"""All ranks digest a folder together, and step down together from a damaged one."""

import errno
import os
import pickle
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lab.patience import PATIENCE
from muster.checkpoint.committed import MARKER
from muster.checkpoint.damage import DAMAGED, CorruptCheckpointError, Damage
from muster.checkpoint.digest import digest_of
from muster.checkpoint.manifest import MANIFEST, Manifest, ManifestReference
from muster.worker.integrations.commit import contents, folders
from muster.worker.integrations.commit.contents import encoded, leave_note
from muster.worker.integrations.commit.folders import FolderSaves
from muster.worker.integrations.commit.lookup import Marker, read
from muster.worker.integrations.commit.numbered import newest
from muster.worker.integrations.commit.staged_checkpoint import StagedCheckpoint
from tests.support.expect import raising, some
from tests.support.hostile.mine import Mine
from tests.support.saves.damage import flip
from tests.support.saves.synced import Synced
from tests.unit.worker.integrations.commit.folder_jobs import RANKS, Job, checkpoint_in


def test_manifest_lists_the_files_of_all_ranks(job: Job, monkeypatch: pytest.MonkeyPatch):
    digested: dict[int, set[str]] = {0: set(), 1: set()}
    share = contents._share
    monkeypatch.setattr(contents, "SEGMENT", 300)

    def recording(pieces: Any, rank: int, world_size: int) -> list[contents.Piece]:
        mine = share(pieces, rank, world_size)
        digested[rank] |= {f"{piece.file}@{piece.offset}" for piece in mine}
        return mine

    monkeypatch.setattr(contents, "_share", recording)
    assert job.save(1) == [None, None]
    path = job.folder / "step-1"
    data = (path / MANIFEST).read_bytes()
    reference = read(path)[1].manifest
    assert reference is not None
    assert reference.matches(data)
    files = Manifest.decode(data).files
    assert {name: entry.size for name, entry in files.items()} == {
        "shards/rank-0": 1000,
        "shards/rank-1": 1000,
    }
    assert all(len(one) == 4 for one in digested.values()), "each rank reads as much"
    assert not digested[0] & digested[1]
    assert {entry.name for entry in path.iterdir()} == {"shards", MARKER, MANIFEST}


def test_all_is_on_the_disk_before_a_checkpoint_has_its_name(job: Job, monkeypatch: pytest.MonkeyPatch):
    synced = Synced.record(monkeypatch)
    job.save(1)
    synced.check_committed(job.folder / "step-1")
    synced.check_made(job.folder)
    synced.check_made(job.folder.parent)


def test_ranks_of_a_host_sync_its_files_together(monkeypatch: pytest.MonkeyPatch):
    assert contents._local_rank(8) == (0, 1), "it is not known which ranks are here: each syncs all"
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert contents._local_rank(8) == (3, 4)
    assert contents._local_rank(2) == (0, 1), "they do not all save"


def test_ranks_report_the_size_of_the_checkpoint(job: Job):
    job.save(1)
    reports = [some(member.reports[-1]) for _, member in job.ranks]
    assert all(report.commits for report in reports)
    assert sum(some(report.bytes) for report in reports) == RANKS * 1000


def test_files_are_synced_when_ranks_list_differently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    written = [tmp_path / "shards" / f"rank-{rank}" for rank in range(30)]
    written[0].parent.mkdir()
    for path in written:
        path.write_bytes(b"weights")
    synced = Synced.record(monkeypatch)
    for rank in range(3):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        contents._sync_share(tmp_path, 3)
        # Other hosts write as well. A later rank lists more than an earlier one.
        (tmp_path / "shards" / f"of-another-host-{rank}").write_bytes(b"weights")
    assert {path.stat().st_ino for path in written} <= synced.files.keys()
    assert {tmp_path.stat().st_ino, written[0].parent.stat().st_ino} <= synced.folders.keys()


def test_folder_that_cannot_be_listed_is_not_taken_for_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "shards").mkdir()
    scan = os.scandir

    def fails(path: Any) -> Any:
        if str(path).endswith("shards"):
            raise OSError(errno.EIO, "Input/output error")
        return scan(path)

    monkeypatch.setattr(os, "scandir", fails)
    with pytest.raises(OSError, match="Input/output error"):
        contents._sync_share(tmp_path, 1)


def test_a_rank_that_cannot_digest_its_share_fails_the_save_of_all(job: Job, monkeypatch: pytest.MonkeyPatch):
    record = contents.record_share

    def failing(folder: Path, rank: int, world_size: int) -> None:
        if rank == 1:
            raise OSError(5, "Input/output error")
        record(folder, rank, world_size)

    monkeypatch.setattr(folders, "record_share", failing)
    failures = job.save(1)
    assert isinstance(failures[1], OSError)
    assert "rank 1 failed: OSError: [Errno 5] Input/output error" in str(failures[0])
    assert not (job.folder / "step-1").exists()


def test_a_rank_that_dies_while_it_digests_is_named(job: Job, monkeypatch: pytest.MonkeyPatch):
    record = contents.record_share

    def dying(folder: Path, rank: int, world_size: int) -> None:
        if rank == 1:
            job.group.lose(1)
            raise SystemExit
        record(folder, rank, world_size)

    monkeypatch.setattr(folders, "record_share", dying)
    failures = job.save(1)
    assert "lost rank 1" in str(failures[0]) or "rank 1 failed" in str(failures[0])
    assert not (job.folder / "step-1").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip(path / "shards" / "rank-0"),
        lambda path: flip(path / "shards" / "rank-1"),
        lambda path: (path / "shards" / "rank-1").write_bytes(b"2"),
        lambda path: (path / "shards" / "rank-1").unlink(),
        lambda path: (path / "shards" / "rank-1").write_bytes(bytes([2]) * 1001),
        lambda path: (path / MANIFEST).unlink(),
        lambda path: flip(path / MANIFEST),
        lambda path: flip(path / MARKER),
    ],
)
def test_damage_that_one_rank_finds_makes_all_step_down(job: Job, damage: Callable[[Path], None]):
    for number in (1, 2):
        job.save(number)
    assert job.choose() == [job.folder / "step-2"] * RANKS
    damage(job.folder / "step-2")
    assert job.choose() == [job.folder / "step-1"] * RANKS
    assert newest(job.folder, "step-") == job.folder / "step-1", "later generations skip it"
    assert job.save(2) == [None, None], "the step is saved again"
    assert job.choose() == [job.folder / "step-2"] * RANKS


def test_damage_that_cannot_be_recorded_is_stepped_down_from_nevertheless(
    job: Job, monkeypatch: pytest.MonkeyPatch
):
    for number in (1, 2):
        job.save(number)
    monkeypatch.setattr(folders, "mark_damaged", raising(OSError, 30, "Read-only file system"))
    flip(job.folder / "step-2" / "shards" / "rank-1")
    assert job.choose() == [job.folder / "step-1"] * RANKS
    flip(job.folder / "step-1" / "shards" / "rank-0")
    assert {type(one) for one in job.choose()} == {CorruptCheckpointError}


def test_the_same_error_on_all_ranks_where_none_is_whole_or_one_was_named(job: Job):
    for number in (1, 2):
        job.save(number)
    flip(job.folder / "step-1" / "shards" / "rank-1")
    for _ in range(2):
        failures = job.choose_named(1)
        assert {type(one) for one in failures} == {CorruptCheckpointError}
        assert len(set(map(str, failures))) == 1
        assert "step-1 is damaged: shards/rank-1 at offset 0" in str(failures[0])
    assert Damage.decode((job.folder / "step-1" / DAMAGED).read_bytes()).rank == 1
    flip(job.folder / "step-2" / "shards" / "rank-0")
    failures = job.choose()
    assert {type(one) for one in failures} == {CorruptCheckpointError}
    assert "all committed checkpoints are damaged" in str(failures[1])


def test_checkpoint_replaced_during_verification_is_not_marked_as_damaged(
    job: Job, monkeypatch: pytest.MonkeyPatch
):
    job.save(1)
    verify = contents.verify_share

    def replaced(folder: Path, reference: Any, rank: int, world_size: int) -> Damage | None:
        if rank == 1:
            staged = StagedCheckpoint(folder, 9, 9, "job", "folders")
            staged.begin()
            staged.commit(Marker("job", 0, 2, "checkpoint/folders", 9))
            return verify(folder, reference, rank, world_size)
        return None

    monkeypatch.setattr(folders, "verify_share", replaced)
    failures = job.choose()
    assert "was replaced while it was loaded" in str(failures[1])
    assert all(isinstance(one, BaseException) for one in failures)
    assert not (job.folder / "step-1" / DAMAGED).exists()


def test_a_checkpoint_without_digests_is_loaded_with_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = checkpoint_in(tmp_path)
    assert Job(tmp_path).choose() == [path] * RANKS
    assert caplog.text.count("step-1 has no digests: it is loaded unverified") == 1


def test_a_file_of_the_framework_that_has_a_name_of_ours_is_not_lost(
    job: Job, monkeypatch: pytest.MonkeyPatch
):
    def write(rank: int, _: int, unfinished: Path) -> None:
        unfinished.mkdir(parents=True, exist_ok=True)
        (unfinished / MANIFEST).write_text("theirs")

    monkeypatch.setattr(job, "write", write)
    assert "and Muster needs that name for its own" in str(job.save(1)[0])
    assert not (job.folder / "step-1").exists()


def test_each_rank_syncs_before_it_votes(job: Job, monkeypatch: pytest.MonkeyPatch):
    synced: dict[int, set[int]] = {}
    """By thread, the files."""
    fsync = os.fsync

    def recording(handle: Any) -> None:
        fsync(handle)
        number = handle if isinstance(handle, int) else handle.fileno()
        synced.setdefault(threading.get_ident(), set()).add(os.fstat(number).st_ino)

    def save(saves: FolderSaves, member: Any) -> int:
        saves.save(member, job.folder / "step-1", partial(job.write, member.rank, 1))
        return threading.get_ident()

    monkeypatch.setattr(os, "fsync", recording)
    threads = job.each(save)
    for rank, thread in enumerate(threads):
        assert isinstance(thread, int)
        assert (job.folder / "step-1" / "shards" / f"rank-{rank}").stat().st_ino in synced[thread]


def test_note_of_a_rank_runs_no_code(tmp_path: Path):
    (tmp_path / "weights").write_bytes(b"weights")
    contents.record_share(tmp_path, 0, 2)
    leave_note(tmp_path, 1, pickle.dumps(Mine(tmp_path / "ran")))
    with pytest.raises(ValueError, match="note cannot be read"):
        contents.gather_manifest(tmp_path, 2)
    assert not (tmp_path / "ran").exists()


def test_rank_0_digests_files_that_another_rank_saw_with_outdated_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As a client of NFS that looks at the attributes that it has kept."""
    monkeypatch.setattr(contents, "SEGMENT", 300)
    (tmp_path / "weights").write_bytes(b"weights" * 150)
    (tmp_path / "empty").touch()
    sizes = contents._sizes
    monkeypatch.setattr(contents, "_sizes", lambda _: {"weights": 700})
    contents.record_share(tmp_path, 1, 2)
    monkeypatch.setattr(contents, "_sizes", sizes)
    contents.record_share(tmp_path, 0, 2)
    manifest = contents.gather_manifest(tmp_path, 2)
    assert {name: entry.size for name, entry in manifest.files.items()} == {"empty": 0, "weights": 1050}
    reference = ManifestReference.of(manifest.encode())
    (tmp_path / MANIFEST).write_bytes(manifest.encode())
    assert [contents.verify_share(tmp_path, reference, rank, 3) for rank in range(3)] == [None] * 3


def test_manifest_is_complete_where_rank_0_sees_outdated_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else a whole checkpoint would be marked as damaged when it is loaded, or a file never be verified."""
    (tmp_path / "weights").write_bytes(b"weights" * 150)
    (tmp_path / "late").write_bytes(b"late")
    contents.record_share(tmp_path, 1, 2)
    with monkeypatch.context() as outdated:
        outdated.setattr(contents, "_sizes", lambda _: {"weights": 700})
        contents.record_share(tmp_path, 0, 2)
        leave_note(tmp_path, 1, encoded({contents.Piece("late", 0, 4): digest_of(b"late")}))
        manifest = contents.gather_manifest(tmp_path, 2)
    assert {name: entry.size for name, entry in manifest.files.items()} == {"late": 4, "weights": 1050}
    reference = ManifestReference.of(manifest.encode())
    (tmp_path / MANIFEST).write_bytes(manifest.encode())
    assert [contents.verify_share(tmp_path, reference, rank, 2) for rank in range(2)] == [None] * 2


def test_a_save_that_has_written_nothing_is_no_checkpoint(job: Job, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job, "write", lambda *_: None)
    assert "the ranks have written nothing" in str(job.save(1)[0])
    assert not (job.folder / "step-1").exists()


def test_replacement_of_a_damaged_checkpoint_is_not_marked_as_damaged(
    job: Job, monkeypatch: pytest.MonkeyPatch
):
    job.save(1)
    flip(job.folder / "step-1" / "shards" / "rank-1")
    look, looked = folders._seen, threading.Event()

    def then_replaced(barrier: Any, folder: Path, name: str, *, verify: bool) -> bytes:
        said = look(barrier, folder, name, verify=verify)
        if barrier.rank == 0:
            looked.wait(PATIENCE)
            checkpoint_in(job.folder)
        looked.set()
        return said

    monkeypatch.setattr(folders, "_seen", then_replaced)
    assert {type(one) for one in job.choose()} == {CorruptCheckpointError}
    assert not (job.folder / "step-1" / DAMAGED).exists()
