"""A folder of checkpoints that cannot lie."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from muster.checkpoint.committed import MARKER, Committed, SaveAttempt, UncommittedError, seal
from muster.checkpoint.damage import DAMAGED, KEPT
from muster.checkpoint.directory import CheckpointDirectory
from muster.checkpoint.version import LaterVersionError
from tests.support.crashes.stat_faults import StatFaults
from tests.support.expect import raising


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(tmp_path / "not" / "there yet")


def commit(folder: CheckpointDirectory, step: int) -> Committed:
    unfinished = folder.unfinished(step, SaveAttempt(0, 0))
    unfinished.mkdir()
    (unfinished / "data").write_text(str(step))
    made = folder.commit(unfinished, Committed(step, 2, "job", "save", step, folder.path(step)))
    assert not unfinished.exists()
    return made


def test_latest_finds_the_checkpoint_committed_last(folder: CheckpointDirectory):
    assert folder.latest() is None
    made = [commit(folder, step) for step in (5, 900, 10)]
    assert folder.latest() == made[2]
    assert [one.step for one in folder.all()] == [5, 900, 10]


def test_a_step_with_more_digits_than_expected_is_still_the_last(folder: CheckpointDirectory):
    commit(folder, 9_999_999_999)
    made = commit(folder, 10_000_000_000)
    assert folder.latest() == made


def test_uncommitted_folder_is_neither_listed_nor_read(folder: CheckpointDirectory):
    commit(folder, 1)
    unfinished = folder.unfinished(2, SaveAttempt(0, 1))
    unfinished.mkdir()
    folder.path(3).mkdir()
    assert [one.step for one in folder.all()] == [1]
    for path in (unfinished, folder.path(3), folder.path(4)):
        with pytest.raises(UncommittedError, match=r"is not a committed checkpoint.*step-0000000001"):
            folder.read(path)


@pytest.mark.parametrize(
    "garbage",
    [
        "",
        "{",
        "[]",
        "7",
        "{}",
        '{"step": 2}',
        b"\xff\xfe",
        {"step": "2"},
        {"step": True},
        {"world_size": None},
        {"step": 8},
        {"more": 1},
    ],
    ids=str,
)
def test_a_marker_that_is_garbage_is_none(folder: CheckpointDirectory, garbage: Any):
    first = commit(folder, 1)
    commit(folder, 2)
    marker = folder.path(2) / MARKER
    if isinstance(garbage, dict):
        garbage = json.dumps(json.loads(marker.read_text()) | garbage)
    marker.write_bytes(garbage.encode() if isinstance(garbage, str) else garbage)
    assert folder.latest() == first
    with pytest.raises(UncommittedError):
        folder.read(folder.path(2))
    folder.sweep(1)
    assert folder.latest() == first


def test_a_marker_that_is_a_folder_is_none(folder: CheckpointDirectory):
    (folder.path(1) / MARKER).mkdir(parents=True)
    assert folder.latest() is None


def test_leftovers_are_swept_and_others_files_are_not(
    folder: CheckpointDirectory, caplog: pytest.LogCaptureFixture
):
    commit(folder, 1)
    left = [folder.unfinished(step, save) for step, save in ((2, SaveAttempt(3, 1)), (2, SaveAttempt(2, 9)))]
    left += [folder.folder / ".step-0000000007.torn-name", folder.folder / ".removed-step-0000000000"]
    begun = [folder.unfinished(step, save) for step, save in ((3, SaveAttempt(3, 2)), (1, SaveAttempt(4, 0)))]
    others = folder.folder / ".git"
    for path in (*left, *begun, others):
        path.mkdir()
        (path / "file").touch()
    folder.sweep(None, SaveAttempt(3, 1))
    assert not any(path.exists() for path in left)
    assert all((path / "file").exists() for path in (*begun, others))
    assert caplog.messages == []
    folder.sweep(None)
    why = "was not committed: its save was interrupted. It is removed"
    assert sorted(caplog.messages) == sorted(f"{path} {why}" for path in begun)
    assert sorted(path.name for path in folder.folder.iterdir()) == [".git", "step-0000000001"]


def test_the_last_ones_are_kept(folder: CheckpointDirectory):
    for step in range(5):
        commit(folder, step)
    folder.sweep(2)
    assert [one.step for one in folder.all()] == [3, 4]
    assert sorted(path.name for path in folder.folder.iterdir()) == ["step-0000000003", "step-0000000004"]


@pytest.mark.parametrize("what", ["a checkpoint", "an unfinished save"])
def test_half_of_one_never_looks_like_one(
    folder: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch, what: str
):
    """The sweep is interrupted when nothing of it is removed yet."""
    if what == "a checkpoint":
        commit(folder, 0)
    else:
        folder.unfinished(0, SaveAttempt(0, 1)).mkdir()
    commit(folder, 1)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            folder.sweep(1)
    assert sorted(path.name for path in folder.folder.iterdir()) == [
        ".removed-step-0000000000" + (".0-1" if what == "an unfinished save" else ""),
        "step-0000000001",
    ]
    folder.sweep(None)
    assert [path.name for path in folder.folder.iterdir()] == ["step-0000000001"]


def test_a_checkpoint_that_cannot_be_removed_does_no_harm(
    folder: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for step in range(2):
        commit(folder, step)
    monkeypatch.setattr(Path, "rename", raising(PermissionError, "not yours"))
    folder.sweep(1)
    assert "cannot be removed" in caplog.text


def link_to_the_older_of_two(folder: CheckpointDirectory) -> Path:
    for step in range(2):
        commit(folder, step)
    link = folder.folder.parent / "linked"
    link.symlink_to(folder.path(0))
    return link


def test_sweep_keeps_a_used_checkpoint_if_its_path_cannot_be_resolved_at_first(
    folder: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
):
    used = link_to_the_older_of_two(folder)
    faults = StatFaults(monkeypatch, used, times=1)
    folder.sweep(1, used=[used])
    assert faults.struck == 1
    assert [one.step for one in folder.all()] == [0, 1]


def test_sweep_removes_nothing_if_a_used_path_cannot_be_resolved(
    folder: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
):
    used = link_to_the_older_of_two(folder)
    with monkeypatch.context() as patched:
        StatFaults(patched, used)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            folder.sweep(1, used=[used])
    assert [one.step for one in folder.all()] == [0, 1]


def test_listing_ends_if_a_path_cannot_be_looked_at(
    folder: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
):
    commit(folder, 1)
    folder.path(2).touch()  # Another program's: no checkpoint.
    assert [one.step for one in folder.all()] == [1]
    StatFaults(monkeypatch, folder.path(2))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        folder.all()


def test_all_is_on_the_disk_before_it_has_its_name(
    folder: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
):
    order: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        order.append(f"{Path(f'/proc/self/fd/{handle}').resolve().name} named={folder.path(1).exists()}")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    commit(folder, 1)
    assert order == [
        f"{MARKER} named=False",
        f"{folder.unfinished(1, SaveAttempt(0, 0)).name} named=False",
        f"{folder.folder.name} named=True",
    ]


def test_a_step_is_not_committed_over_another(folder: CheckpointDirectory):
    commit(folder, 1)
    with pytest.raises(OSError):
        commit(folder, 1)
    assert (folder.path(1) / "data").read_text() == "1"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a file").touch()
    with pytest.raises(OSError):
        CheckpointDirectory(tmp_path / "a file")
    monkeypatch.setattr(os, "access", lambda *_: False)  # The tests may run as root, who may all.
    with pytest.raises(PermissionError, match="cannot be written by this user"):
        CheckpointDirectory(tmp_path)


def committed(folder: CheckpointDirectory, step: int) -> Path:
    unfinished = folder.unfinished(step, SaveAttempt(0, 0))
    unfinished.mkdir()
    (unfinished / "__0_0.distcp").touch()
    path = folder.path(step)
    folder.commit(unfinished, Committed(step, 1, "job", "save", step, path))
    return path


def test_a_look_that_retention_overtakes_is_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reader, writer = CheckpointDirectory(tmp_path), CheckpointDirectory(tmp_path)
    committed(writer, 1)
    marked = reader._marked

    def late(path: Path) -> Committed:
        if not writer.path(2).exists():
            committed(writer, 2)
            writer.sweep(1)
        return marked(path)

    monkeypatch.setattr(reader, "_marked", late)
    latest = reader.latest()
    assert latest is not None
    assert latest.step == 2


def test_checkpoint_cannot_be_committed_during_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rank 0 of an earlier generation commits while a new one cleans up."""
    old, new = CheckpointDirectory(tmp_path), CheckpointDirectory(tmp_path)
    unfinished = old.unfinished(1, SaveAttempt(0, 0))
    unfinished.mkdir()
    (unfinished / "__0_0.distcp").touch()
    unlink = os.unlink
    refused: list[OSError] = []

    def commit_first(*arguments: Any, **options: Any) -> None:
        if not refused:
            try:
                old.commit(unfinished, Committed(1, 1, "job", "save", 1, old.path(1)))
            except OSError as error:
                refused.append(error)
        unlink(*arguments, **options)

    monkeypatch.setattr(os, "unlink", commit_first)
    new.sweep(None)
    assert refused
    assert new.latest() is None


@pytest.mark.parametrize("name", [".step-0000000001.0-0", ".removed-step-0000000001"])
def test_unfinished_or_partly_removed_checkpoint_is_refused(tmp_path: Path, name: str):
    folder = CheckpointDirectory(tmp_path)
    committed(folder, 1).rename(tmp_path / name)
    with pytest.raises(UncommittedError, match="not committed, or is being removed"):
        folder.read(tmp_path / name)


def test_checkpoint_of_a_later_version_is_an_error_and_not_damage(folder: CheckpointDirectory):
    commit(folder, 1)
    commit(folder, 2)
    fields = json.loads((folder.path(2) / MARKER).read_text())
    del fields["digest"]
    (folder.path(2) / MARKER).write_bytes(seal(fields | {"format": 2}))
    for look in (folder.latest, lambda: folder.sweep(1), lambda: folder.read(folder.path(2))):
        with pytest.raises(LaterVersionError, match="it has format 2, and this one knows format 1"):
            look()
    assert folder.path(1).exists()


def test_field_that_is_not_known_is_ignored(folder: CheckpointDirectory):
    made = commit(folder, 1)
    fields = json.loads((folder.path(1) / MARKER).read_text())
    del fields["digest"]
    (folder.path(1) / MARKER).write_bytes(seal(fields | {"more": 1}))
    assert folder.latest() == made


def test_drafts_of_two_runs_differ_and_a_run_that_saves_sweeps_only_its_own(tmp_path: Path):
    """A job that is started again under another run id counts its generations from the start again."""
    old, new = CheckpointDirectory(tmp_path, "slurm-1"), CheckpointDirectory(tmp_path, "slurm-2")
    drafts = [one.unfinished(1, SaveAttempt(0, 0)) for one in (old, new)]
    for draft in drafts:
        draft.mkdir()
    old.sweep(None, SaveAttempt(7, 0))
    assert [draft.exists() for draft in drafts] == [False, True]
    new.sweep(None, SaveAttempt(0, 0))
    assert not drafts[1].exists()


def test_restored_marker_does_not_come_after_a_later_commit(folder: CheckpointDirectory):
    for step in (90, 100):
        commit(folder, step)
    marker = folder.path(100) / MARKER
    data = marker.read_bytes()
    marker.write_bytes(data[:-1])
    made = commit(folder, 60)
    marker.write_bytes(data)
    assert folder.latest() == made


def lose_marker(folder: CheckpointDirectory, step: int) -> Path:
    """Let a checkpoint of release 0.1.0 lose its marker."""
    path = folder.path(step)
    commit(folder, step)
    (path / MARKER).unlink()
    (path / ".metadata").touch()
    return path


def test_checkpoint_of_0_1_0_that_lost_its_marker_is_damaged_and_stays(folder: CheckpointDirectory):
    path = lose_marker(folder, 1)
    (entry,) = folder.entries()
    assert str(entry.damage) == "committed.json: it is missing"
    assert folder.latest() is None
    with pytest.raises(OSError):
        commit(folder, 1)
    for step in (2, 3):
        commit(folder, step)
    folder.sweep(1)
    assert (path / ".metadata").exists()
    assert [one.step for one in folder.entries()] == [1, 3]


@pytest.mark.parametrize("name", ["step-100", "step-00000000x1", "step-0000000001.old", "checkpoint-1"])
def test_checkpoint_of_another_program_is_no_lost_one(folder: CheckpointDirectory, name: str):
    lose_marker(folder, 1).rename(folder.folder / name)
    assert folder.entries() == []


def test_kept_checkpoint_is_not_replaced_though_it_is_damaged(folder: CheckpointDirectory):
    commit(folder, 1)
    for mark in (DAMAGED, KEPT):
        (folder.path(1) / mark).touch()
    with pytest.raises(OSError):
        commit(folder, 1)
    (folder.path(1) / KEPT).unlink()
    folder.sweep(None)
    assert commit(folder, 1) == folder.latest()


def test_commit_after_a_sweep_reads_no_marker_again(
    folder: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
):
    reads: list[Path] = []
    marked = folder._marked

    def counted(path: Path) -> Committed:
        reads.append(path)
        return marked(path)

    monkeypatch.setattr(folder, "_marked", counted)
    for step in range(1, 6):
        assert commit(folder, step).order == step
        folder.sweep(3)
        assert len(reads) == min(step, 4), "each marker once"
        reads.clear()
    other = CheckpointDirectory(folder.folder)
    assert commit(other, 6).order == 6
    folder.sweep(3)
    assert commit(folder, 7).order == 7
    assert commit(folder, 8).order == 8
