"""Inventories of folders and buckets, by a Checkpointer or an adapter, and their marks."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from uuid import uuid4

import pytest

from muster.checkpoint import retry
from muster.checkpoint.bucket.fsspec_objects import FsspecObjects
from muster.checkpoint.bucket.protocol import CheckpointBucket
from muster.checkpoint.committed import MARKER, SaveAttempt, UncommittedError
from muster.checkpoint.damage import DAMAGED, KEPT, Damage
from muster.checkpoint.digest import Segment, digest_of
from muster.checkpoint.directory import CheckpointDirectory, write_marker
from muster.checkpoint.inventory import FolderInventory, inventory_of
from muster.checkpoint.manifest import MANIFEST, FileEntry, Manifest, ManifestReference
from muster.checkpoint.stored import NotCommittedError
from muster.checkpoint.verification import read_manifest, verify
from muster.checkpoint.version import LaterVersionError
from tests.support.saves.stored_checkpoints import by_adapter, in_bucket, in_folder

MARK = Damage("", "a bad disk").encode()


@pytest.fixture
def objects() -> FsspecObjects:
    return FsspecObjects(f"memory://{uuid4().hex}", {})


def names(place: Path | str) -> list[str]:
    return [one.name for one in inventory_of(str(place)).checkpoints()]


# ---------------------------------------------------------------------- folders


def test_checkpoints_are_listed_newest_commit_first(tmp_path: Path):
    for step in (80, 100, 60):
        in_folder(tmp_path, step)
    listed = FolderInventory(tmp_path).checkpoints()
    assert [one.step for one in listed] == [60, 100, 80]
    newest = listed[0]
    assert newest.made is not None
    assert (newest.made.run_id, newest.committed_at, newest.has_digests) == ("job1", 1_700_000_000.0, True)
    assert (newest.damage, newest.kept, newest.marked_damaged) == (None, False, False)
    assert newest.size == sum(path.stat().st_size for path in (tmp_path / newest.name).iterdir())


def test_looking_makes_and_changes_nothing(tmp_path: Path):
    in_folder(tmp_path, 1)
    (tmp_path / ".step-0000000002.0-1").mkdir()
    before = sorted(tmp_path.rglob("*"))
    FolderInventory(tmp_path).checkpoints()
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(FileNotFoundError):
        FolderInventory(tmp_path / "none").checkpoints()
    assert not (tmp_path / "none").exists()


def test_uncommitted_saves_and_other_folders_are_not_listed(tmp_path: Path):
    in_folder(tmp_path, 1)
    in_folder(tmp_path, 2).rename(tmp_path / ".removed-step-0000000002")
    for name in (".step-0000000003.0-1", "step-0000000004", "logs", "lost+found"):
        (tmp_path / name).mkdir()
    (tmp_path / "logs" / MANIFEST).write_text("of another program")
    (tmp_path / "step-0000000005").write_text("a file")
    assert names(tmp_path) == ["step-0000000001"]


def test_checkpoint_without_digests_has_its_age_from_its_marker(tmp_path: Path):
    path = in_folder(tmp_path, 1, digests=False, committed_at=0.0)
    os.utime(path / MARKER, (5.0, 5.0))
    (one,) = FolderInventory(tmp_path).checkpoints()
    assert (one.has_digests, one.committed_at) == (False, 5.0)


def test_checkpoints_of_adapters_are_listed_by_the_number_in_their_name(tmp_path: Path):
    by_adapter(tmp_path / "checkpoint-500")
    by_adapter(tmp_path / "step-100", digests=False)
    by_adapter(tmp_path / "final")
    found = {
        one.name: (one.step, one.has_digests, one.damage) for one in FolderInventory(tmp_path).checkpoints()
    }
    assert found == {
        "checkpoint-500": (500, True, None),
        "step-100": (100, False, None),
        "final": (None, True, None),
    }


def test_checkpoint_with_an_interrupted_replacement_is_listed(tmp_path: Path):
    """Between two renames an adapter's checkpoint has this name only, and the next generation restores it."""
    by_adapter(tmp_path / "last").rename(tmp_path / ".last.replaced")
    assert names(tmp_path) == [".last.replaced"]
    by_adapter(tmp_path / "last")
    assert names(tmp_path) == ["last"]


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b"[" * 100_000, b'{"step": 7}', b"\xff"])
def test_damaged_marker_is_damage_with_its_reason(tmp_path: Path, garbage: bytes):
    in_folder(tmp_path, 1)
    (in_folder(tmp_path, 2) / MARKER).write_bytes(garbage)
    damaged, whole = FolderInventory(tmp_path).checkpoints()
    assert (whole.step, whole.damage) == (1, None)
    assert (damaged.step, damaged.made, damaged.marked_damaged) == (2, None, False)
    assert damaged.damage is not None
    assert damaged.damage.file == MARKER


def test_lost_marker_is_damage_where_a_manifest_is_left(tmp_path: Path):
    (in_folder(tmp_path, 1) / MARKER).unlink()
    (one,) = FolderInventory(tmp_path).checkpoints()
    assert str(one.damage) == f"{MARKER}: it is missing"


def test_marker_of_another_step_is_damage(tmp_path: Path):
    in_folder(tmp_path, 1).rename(tmp_path / "step-0000000002")
    (one,) = FolderInventory(tmp_path).checkpoints()
    assert (one.step, "says that it is step 1" in str(one.damage)) == (2, True)


@pytest.mark.parametrize("name", ["step-0000000001", "checkpoint-1", "final"])
def test_place_may_be_one_checkpoint(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    if name.startswith("step"):
        in_folder(tmp_path, 1)
        in_folder(tmp_path, 2)
    else:
        by_adapter(tmp_path / name)
        by_adapter(tmp_path / "another")
    (tmp_path / "link").symlink_to(name)
    for place in (tmp_path / name, tmp_path / "link", f"file://{tmp_path / name}"):
        assert names(place) == [name]
    monkeypatch.chdir(tmp_path / name)
    assert names(".") == [name]


def file_checkpoint(path: Path, content: bytes) -> None:
    """Make a checkpoint that is one file, as Lightning's adapter does."""
    path.write_bytes(content)
    entry = FileEntry((Segment(len(content), digest_of(content)),))
    data = Manifest({path.name: entry}).encode()
    beside = path.with_name(f".{path.name}.committed")
    beside.mkdir()
    (beside / MANIFEST).write_bytes(data)
    said = {
        "run_id": "job",
        "generation": 0,
        "world_size": 2,
        "prefix": "checkpoint/lightning",
        "sequence": 1,
    }
    write_marker(beside, said | {"order": 1, "manifest": asdict(ManifestReference.of(data))})


@pytest.mark.parametrize("name", ["epoch=1-step=500.ckpt", "step-500.ckpt"])
def test_checkpoint_that_is_a_file_is_listed_verified_and_marked(tmp_path: Path, name: str):
    path = tmp_path / name
    file_checkpoint(path, b"weights")
    (tmp_path / "theirs.ckpt").touch()
    (tmp_path / f"..{path.name}.committed.replaced").mkdir()
    (tmp_path / "link").symlink_to(path)
    for place in (tmp_path, path, tmp_path / "link"):
        inventory = FolderInventory(place)
        one = inventory.checkpoints()[0]
        assert (one.name, one.step, one.has_digests, one.damage) == (path.name, 500, True, None)
        assert one.made is not None
        manifest = read_manifest(one.source, one.made.manifest)
        assert manifest is not None
        assert [found.damages for found in verify(one.source, manifest, 1)] == [()]
    inventory.mark(one, DAMAGED, Damage("", "for a test").encode())
    (marked,) = inventory.checkpoints()
    assert marked.marked_damaged
    inventory.unmark(marked, DAMAGED)
    (beside,) = tmp_path.glob(".*ckpt.committed")
    (beside / MARKER).write_text("{")
    assert inventory.checkpoints()[0].damage is not None
    with pytest.raises(NotCommittedError, match="without a marker beside it"):
        FolderInventory(tmp_path / "theirs.ckpt").checkpoints()


def test_lost_marker_of_a_checkpoint_without_a_manifest_is_damage(tmp_path: Path):
    lost = tmp_path / "step-0000000003"
    lost.mkdir()
    (lost / ".metadata").touch()
    for place in (tmp_path, lost):
        (one,) = FolderInventory(place).checkpoints()
        assert one.step == 3
        assert str(one.damage) == "committed.json: it is missing"
        assert not one.kept


@pytest.mark.parametrize("name", [".step-0000000002.0-1", "step-3", "torch"])
def test_one_that_was_not_committed_is_refused(tmp_path: Path, name: str):
    (tmp_path / name).mkdir()
    (tmp_path / name / ".metadata").touch()
    with pytest.raises(NotCommittedError, match="is not a committed checkpoint"):
        FolderInventory(tmp_path / name).checkpoints()


def test_io_error_is_no_absence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    in_folder(tmp_path, 1)
    monkeypatch.setattr(retry, "DELAYS", ())
    real = Path.read_bytes

    def read(path: Path) -> bytes:
        if path.name == MARKER:
            raise OSError("stale file handle")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    with pytest.raises(OSError, match="stale file handle"):
        FolderInventory(tmp_path).checkpoints()


def test_foreign_folder_that_may_not_be_read_is_passed_over_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    in_folder(tmp_path, 1)
    (tmp_path / "lost+found").mkdir()
    real = Path.iterdir

    def iterdir(path: Path) -> object:
        if path.name == "lost+found":
            raise PermissionError("Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert names(tmp_path) == ["step-0000000001"]
    assert "lost+found is passed over: Permission denied" in caplog.text


# ---------------------------------------------------------------------- marks


def test_marks_of_a_folder_are_what_a_job_sees(tmp_path: Path):
    for step in (1, 2, 3):
        in_folder(tmp_path, step)
    inventory = FolderInventory(tmp_path)
    three, _, one = inventory.checkpoints()
    inventory.mark(three, DAMAGED, MARK)
    inventory.mark(one, KEPT)
    job = CheckpointDirectory(tmp_path)
    latest = job.latest()
    assert latest is not None
    assert latest.step == 2
    job.sweep(1)
    assert [entry.step for entry in job.entries()] == [1, 2, 3]
    three, _, one = inventory.checkpoints()
    assert (three.marked_damaged, str(three.damage), one.kept) == (True, "a bad disk", True)
    inventory.unmark(three, DAMAGED)
    inventory.unmark(one, KEPT)
    inventory.unmark(one, KEPT)
    assert [found.marks for found in inventory.checkpoints()] == [frozenset()] * 3
    job.sweep(1)
    assert [entry.step for entry in job.entries()] == [3]


@pytest.mark.parametrize("change", ["mark", "unmark"])
def test_mark_is_on_the_disk_when_it_is_made_or_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
):
    path = in_folder(tmp_path, 1)
    inventory = FolderInventory(tmp_path)
    (one,) = inventory.checkpoints()
    if change == "unmark":
        inventory.mark(one, DAMAGED, MARK)
    order: list[tuple[str, int]] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced = Path(f"/proc/self/fd/{handle}").resolve()
        order.append((synced.name, synced.stat().st_size if synced.is_file() else (path / DAMAGED).exists()))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    if change == "mark":
        inventory.mark(one, DAMAGED, MARK)
        assert order == [(DAMAGED, len(MARK)), (path.name, True)]
    else:
        inventory.unmark(one, DAMAGED)
        assert order == [(path.name, False)]


def test_marks_do_not_count_as_content(tmp_path: Path):
    in_folder(tmp_path, 1)
    inventory = FolderInventory(tmp_path)
    (before,) = inventory.checkpoints()
    inventory.mark(before, DAMAGED, MARK)
    assert inventory.checkpoints()[0].size == before.size


# ---------------------------------------------------------------------- buckets


def test_checkpoints_of_a_bucket_are_listed_newest_commit_first(objects: FsspecObjects):
    bucket = CheckpointBucket(objects, objects.url, "job1")
    committed = [in_bucket(objects, step, bucket=bucket).name for step in (80, 100, 60)]
    objects.put(f"{bucket.attempt(110, SaveAttempt(0, 9)).name}/__0_0.distcp", b"not committed")
    listed = inventory_of(objects.url).checkpoints()
    assert [one.name for one in listed] == committed[::-1]
    assert [one.step for one in listed] == [60, 100, 80]
    assert (listed[0].damage, listed[0].has_digests, listed[0].committed_at) == (None, True, 1_700_000_000.0)


def test_place_may_be_one_checkpoint_of_a_bucket(objects: FsspecObjects):
    bucket = CheckpointBucket(objects, objects.url, "job1")
    one, _ = (in_bucket(objects, step, bucket=bucket).name for step in (1, 2))
    assert names(f"{objects.url}/{one}") == names(f"{objects.url}/{one}/") == [one]
    missing = bucket.attempt(3, SaveAttempt(0, 0)).name
    with pytest.raises(NotCommittedError, match="is not a committed checkpoint"):
        names(f"{objects.url}/{missing}")


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b"[" * 100_000, b'{"format": 1}'])
def test_damaged_verdict_is_damage(objects: FsspecObjects, garbage: bytes):
    bucket = CheckpointBucket(objects, objects.url, "job1")
    whole, damaged = (in_bucket(objects, step, bucket=bucket) for step in (1, 2))
    objects.put(damaged.verdict, garbage)
    found = {one.name: one for one in inventory_of(objects.url).checkpoints()}
    assert found[whole.name].damage is None
    assert (found[damaged.name].made, found[damaged.name].step) == (None, 2)
    assert "cannot be read" in str(found[damaged.name].damage)


def test_missing_object_is_damage(objects: FsspecObjects):
    attempt = in_bucket(objects, 1)
    objects.remove([f"{attempt.name}/__1_0.distcp"])
    (one,) = inventory_of(objects.url).checkpoints()
    assert "1 are not there as they were written, such as __1_0.distcp" in str(one.damage)
    assert not one.marked_damaged


def test_checkpoint_that_retention_removes_meanwhile_is_not_damaged(
    objects: FsspecObjects, monkeypatch: pytest.MonkeyPatch
):
    bucket = CheckpointBucket(objects, objects.url, "job1")
    _, new = (in_bucket(objects, step, bucket=bucket) for step in (1, 2))
    readers = FsspecObjects(objects.url, {})
    real = readers.sizes

    def sizes(folder: str) -> dict[str, int]:
        bucket.sweep(1, SaveAttempt(9, 9))
        return real(folder)

    monkeypatch.setattr(readers, "sizes", sizes)
    reader = CheckpointBucket(readers, objects.url, "")
    assert [entry.attempt for entry in reader.entries()] == [new]


def test_marks_of_a_bucket_are_what_a_job_sees(objects: FsspecObjects):
    bucket = CheckpointBucket(objects, objects.url, "job1")
    for step in (1, 2, 3):
        in_bucket(objects, step, bucket=bucket)
    inventory = inventory_of(objects.url)
    three, _, one = inventory.checkpoints()
    inventory.mark(three, DAMAGED, MARK)
    inventory.mark(one, KEPT)
    job: Callable[[], CheckpointBucket] = lambda: CheckpointBucket(objects, objects.url, "job1")  # noqa: E731
    latest = job().latest()
    assert latest is not None
    assert latest.step == 2
    job().sweep(1)
    three, *_, one = inventory_of(objects.url).checkpoints()
    assert (three.step, three.marked_damaged, str(three.damage)) == (3, True, "a bad disk")
    assert (one.step, one.kept) == (1, True)
    for found, mark in ((three, DAMAGED), (one, KEPT)):
        inventory.unmark(found, mark)
        inventory.unmark(found, mark)
    job().sweep(1)
    (left,) = inventory_of(objects.url).checkpoints()
    assert (left.step, left.damage, left.marks) == (3, None, frozenset())


def test_verdict_of_a_later_version_is_not_guessed(objects: FsspecObjects):
    attempt = in_bucket(objects, 1)
    objects.put(attempt.verdict, json.dumps({"format": 2}).encode())
    with pytest.raises(LaterVersionError, match="another version"):
        names(objects.url)


def test_folder_of_checkpoints_copied_to_a_bucket_is_named(objects: FsspecObjects):
    objects.put(f"step-0000000100/{MARKER}", b"{}")
    with pytest.raises(UncommittedError, match="committed by rename"):
        names(objects.url)


# ---------------------------------------------------------------------- addresses


@pytest.mark.parametrize("address", ["nothing://here", "s3://", "memory://a/*"])
def test_address_that_is_none_is_refused(address: str):
    with pytest.raises(ValueError):
        inventory_of(address)


def test_missing_package_is_named():
    with pytest.raises(ImportError, match=r"gs:// that is not installed: .*gcsfs"):
        inventory_of("gs://bucket/job1")
