"""Checkpoints that have their name when they are committed, and not before."""

import errno
import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from muster.checkpoint import retry
from muster.checkpoint.committed import MARKER, UncommittedError, seal
from muster.checkpoint.damage import DAMAGED, CorruptCheckpointError, Damage
from muster.checkpoint.directory import write_marker
from muster.checkpoint.manifest import MANIFEST, Manifest
from muster.worker.integrations.commit import staged_checkpoint as module
from muster.worker.integrations.commit.cleanup import finish, remove, restore
from muster.worker.integrations.commit.contents import manifest_of_file, verify_share
from muster.worker.integrations.commit.lookup import (
    REPLACED,
    Marker,
    ReplacedError,
    latest,
    mark_damaged,
    read,
    read_whole,
)
from muster.worker.integrations.commit.staged_checkpoint import StagedCheckpoint
from tests.support.expect import raising
from tests.support.saves.synced import Synced
from tests.unit.worker.integrations.commit.folder_jobs import names


def marker(sequence: int = 7) -> Marker:
    return Marker("job", 0, 2, "checkpoint/dcp", sequence)


def saved(path: Path, content: str, number: int = 1) -> None:
    staged = StagedCheckpoint(path, 0, number, "job")
    staged.begin()
    (staged.unfinished / "part").write_text(content)
    staged.commit(marker())


def content(path: Path) -> str:
    return (read(path)[0] / "part").read_text()


def test_committed_checkpoint_has_its_final_name_and_leaves_no_other_files(tmp_path: Path):
    saved(tmp_path / "far" / "last", "one")
    assert content(tmp_path / "far" / "last") == "one"
    assert names(tmp_path / "far") == {"last"}


def test_another_of_the_same_name_takes_its_place(tmp_path: Path):
    saved(tmp_path / "last", "one")
    saved(tmp_path / "last", "two", 2)
    assert content(tmp_path / "last") == "two"
    assert names(tmp_path) == {"last"}


@pytest.mark.parametrize(("renamed", "found"), [(0, "one"), (1, "one"), (2, "two")])
def test_commit_that_dies_at_any_rename_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renamed: int, found: str
):
    path = tmp_path / "last"
    saved(path, "one")
    rename = Path.rename
    done: list[Path] = []

    def dying(self: Path, target: Path) -> Path:
        if len(done) == renamed:
            raise KeyboardInterrupt
        done.append(target)
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", dying)
        with pytest.raises(KeyboardInterrupt):
            saved(path, "two", 2)
    assert content(path) == found
    assert latest(tmp_path) == path
    StagedCheckpoint(path, 1, 0, "job").begin()
    assert names(tmp_path) == {"last", ".last.1-0-fbd8e0f8"}
    assert content(path) == found


def test_folder_made_by_a_script_does_not_hide_the_checkpoint_being_replaced(tmp_path: Path):
    path = tmp_path / "last"
    saved(path, "one")
    path.rename(tmp_path / f".last{REPLACED}")  # The process that replaced it has died here.
    path.mkdir()
    assert content(path) == "one"
    assert latest(tmp_path) == path
    staged = StagedCheckpoint(path, 1, 0, "job")
    staged.begin()
    assert content(path) == "one"
    (staged.unfinished / "part").write_text("two")
    staged.commit(marker())
    assert content(path) == "two"
    assert names(tmp_path) == {"last"}


@pytest.mark.parametrize("late", [False, True], ids=["before it commits", "in the midst of it"])
def test_staged_checkpoint_removed_by_a_newer_generation_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
):
    path = tmp_path / "last"
    saved(path, "one")
    old, new = StagedCheckpoint(path, 0, 2, "job"), StagedCheckpoint(path, 1, 0, "job")
    old.begin()

    def taken(folder: Path, content: dict[str, Any]) -> None:
        write_marker(folder, content)
        new.begin()

    if late:
        monkeypatch.setattr(module, "write_marker", taken)
    else:
        new.begin()
    with pytest.raises(OSError, match=r"No such file|\.last\.1-0"):
        old.commit(marker())
    assert content(path) == "one"
    assert "last" in names(tmp_path)


def test_a_disk_that_fails_after_the_rename_does_not_uncommit_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def failing(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(module, "sync", failing)
    saved(tmp_path / "last", "one")
    assert content(tmp_path / "last") == "one"
    assert "last has its name, and may lose it if this machine fails now" in caplog.text


def test_a_save_that_is_given_up_leaves_nothing(tmp_path: Path):
    staged = StagedCheckpoint(tmp_path / "step-1", 0, 1, "job")
    staged.begin()
    staged.give_up()
    staged.give_up()
    assert names(tmp_path) == set()


def test_uncommitted_checkpoint_is_not_loaded_and_is_swept(tmp_path: Path):
    path = tmp_path / "last"
    staged = StagedCheckpoint(path, 0, 1, "job")
    staged.begin()
    with pytest.raises(UncommittedError, match=r"last is not a committed checkpoint: .*No such file"):
        read(path)
    assert latest(tmp_path) is None
    saved(path, "two", 2)
    assert names(tmp_path) == {"last"}


def test_sweep_leaves_files_of_other_names_alone(tmp_path: Path):
    others = [
        StagedCheckpoint(tmp_path / name, 0, 1, "job").unfinished for name in ("last.2", "las", "last[1]")
    ]
    for other in others:
        other.mkdir()
    (tmp_path / ".last.txt").touch()
    saved(tmp_path / "last", "one", 2)
    assert all(other.is_dir() for other in others)
    assert (tmp_path / ".last.txt").exists()


@pytest.mark.parametrize("said", ["", "[]", "{}", '{"run_id": "job"}', "\xff"])
def test_a_marker_that_is_none_is_named(tmp_path: Path, said: str):
    saved(tmp_path / "last", "one")
    (tmp_path / "last" / MARKER).write_text(said)
    with pytest.raises(UncommittedError, match="last is not a committed checkpoint"):
        read(tmp_path / "last")
    assert latest(tmp_path) is None


def test_the_latest_is_what_was_committed_last(tmp_path: Path):
    assert latest(tmp_path / "nowhere") is None
    for number, name in enumerate(("step-20", "step-3")):
        saved(tmp_path / name, name, number)
        os.utime(tmp_path / name / MARKER, (-number, -number))  # As a copy has another time.
    (tmp_path / "step-99").mkdir()
    assert latest(tmp_path) == tmp_path / "step-3"


def saved_file(path: Path, content: str, number: int = 1) -> None:
    staged = StagedCheckpoint(path, 0, number, "job", alias="another", within=path.name)
    staged.prepare()
    staged.unfinished.parent.mkdir()
    assert staged.unfinished.parent.name == f".another.0-{number}-fbd8e0f8"
    staged.unfinished.write_text(content)
    staged.commit(marker(), manifest_of_file(staged.unfinished))


def damage_in(path: Path) -> Damage | None:
    """Verify a checkpoint as a load does."""
    return verify_share(path, read(path)[1].manifest, 0, 1)


def test_a_checkpoint_may_be_a_file_and_one_rename_replaces_it(tmp_path: Path):
    path = tmp_path / "far" / "last"
    StagedCheckpoint(path, 0, 0, "job", alias="another").begin()
    for number, content in enumerate(("one", "two"), 1):
        saved_file(path, content, number)
        assert path.read_text() == content
        assert names(path.parent) == {"last", ".last.committed"}
        assert read(path)[1].order == number
        assert damage_in(path) is None
        assert latest(path.parent) == path


@pytest.mark.parametrize(("renamed", "found"), [(0, "one"), (1, "one"), (2, "two"), (3, "two"), (4, "two")])
def test_file_and_what_describes_it_agree_whenever_its_commit_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renamed: int, found: str
):
    path = tmp_path / "last"
    saved_file(path, "one")
    saved_file(path, "one", 2)
    rename = Path.rename
    done: list[Path] = []

    def dying(self: Path, target: Path) -> Path:
        if len(done) == renamed:
            raise KeyboardInterrupt
        done.append(target)
        return rename(self, target)

    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr(Path, "rename", dying)
        saved_file(path, "two", 3)
    finish(path)
    assert path.read_text() == found
    assert damage_in(path) is None
    assert read(path)[1].order == (2 if found == "one" else 3)
    saved_file(path, "three", 4)
    assert damage_in(path) is None
    assert names(tmp_path) == {"last", ".last.committed"}


def test_file_that_is_damaged_is_found_and_marked(tmp_path: Path):
    path = tmp_path / "last"
    saved_file(path, "one")
    saved_file(tmp_path / "other", "other")
    (tmp_path / "link").symlink_to("last")
    path.write_text("oni")
    damage = damage_in(path)
    assert damage is not None
    assert damage.file == "last"
    assert damage_in(tmp_path / "link") is not None
    mark_damaged(path, read(path)[1], damage)
    assert latest(tmp_path) == tmp_path / "other"
    with pytest.raises(CorruptCheckpointError, match="last is damaged: last at offset 0"):
        read_whole(path)
    remove(path)
    assert names(tmp_path) == {"other", ".other.committed", "link"}


def test_file_without_its_marker_was_written_by_something_else(tmp_path: Path):
    (tmp_path / "theirs").write_text("content")
    with pytest.raises(UncommittedError):
        read(tmp_path / "theirs")
    assert latest(tmp_path) is None


@pytest.mark.parametrize("kind", ["link", "committed folder", "folder"])
def test_a_file_takes_the_place_of_whatever_has_its_name(tmp_path: Path, kind: str):
    path = tmp_path / "last"
    if kind == "link":
        path.symlink_to("nowhere")
    elif kind == "folder":
        path.mkdir()
    else:
        saved(path, "one")
    saved_file(path, "two", 2)
    assert path.read_text() == "two"
    assert names(tmp_path) == {"last", ".last.committed"}
    assert damage_in(path) is None


def test_a_link_is_replaced_and_what_it_leads_to_is_kept(tmp_path: Path):
    saved(tmp_path / "step-1", "one")
    (tmp_path / "last").symlink_to("step-1")
    saved(tmp_path / "last", "two", 2)
    assert [content(tmp_path / name) for name in ("step-1", "last")] == ["one", "two"]
    assert names(tmp_path) == {"step-1", "last"}


def test_names_that_were_lost_are_given_back(tmp_path: Path):
    for name in ("last", "best", "torn"):
        saved(tmp_path / name, name)
        (tmp_path / name).rename(tmp_path / f".{name}{REPLACED}")
    (tmp_path / "best").mkdir()
    (tmp_path / f".torn{REPLACED}" / MARKER).unlink()
    assert restore(tmp_path) == [tmp_path / "last"]
    assert restore(tmp_path) == []
    assert content(tmp_path / "last") == "last"


def test_whatever_it_is_it_can_be_removed(tmp_path: Path):
    saved(tmp_path / "folder", "one")
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "file").touch()
    for name in ("link", "file", "folder", "nothing"):
        remove(tmp_path / name)
    assert names(tmp_path) == set()


def test_a_marker_of_an_earlier_version_is_read(tmp_path: Path):
    saved(tmp_path / "last", "one")
    said = asdict(marker())
    del said["manifest"]
    (tmp_path / "last" / MARKER).write_text(json.dumps(said))
    assert read(tmp_path / "last")[1] == marker()


def test_the_marker_names_the_manifest(tmp_path: Path):
    staged = StagedCheckpoint(tmp_path / "last", 0, 1, "job")
    staged.begin()
    staged.commit(marker(), Manifest({}))
    reference = read(tmp_path / "last")[1].manifest
    assert reference is not None
    assert reference.matches((tmp_path / "last" / MANIFEST).read_bytes())


def test_a_marker_that_was_changed_is_damage_where_there_is_a_manifest(tmp_path: Path):
    for name, manifest in (("ours", Manifest({})), ("old", None)):
        staged = StagedCheckpoint(tmp_path / name, 0, 1, "job")
        staged.begin()
        staged.commit(marker(), manifest)
        data = (tmp_path / name / MARKER).read_bytes()
        (tmp_path / name / MARKER).write_bytes(data.replace(b'"world_size": 2', b'"world_size": 4'))
    with pytest.raises(CorruptCheckpointError, match=r"ours is damaged: .*does not agree with its digest"):
        read_whole(tmp_path / "ours")
    with pytest.raises(UncommittedError, match="does not agree with its digest"):
        read_whole(tmp_path / "old")


@pytest.mark.parametrize("place", ["marker", "folder", "mark"])
def test_an_error_of_the_storage_is_not_taken_for_absence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
):
    saved(tmp_path / "last", "one")
    monkeypatch.setattr(retry, "DELAYS", (0.0,))
    failing = {"marker": MARKER, "mark": DAMAGED, "folder": tmp_path.name}[place]
    tries = []

    def failed(self: Path, *arguments: Any) -> Any:
        if self.name == failing:
            tries.append(self)
            raise OSError(5, "Input/output error")
        return theirs(self, *arguments)

    method = "iterdir" if place == "folder" else "read_bytes"
    theirs = getattr(Path, method)
    monkeypatch.setattr(Path, method, failed)
    with pytest.raises(OSError, match="Input/output error"):
        latest(tmp_path)
    assert len(tries) == 2, "it is read again"


def test_the_first_mark_stays_and_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved(tmp_path / "last", "one")
    synced = Synced.record(monkeypatch)
    for reason in ("flipped", "cut"):
        mark_damaged(tmp_path / "last", read(tmp_path / "last")[1], Damage("part", reason))
    with pytest.raises(CorruptCheckpointError, match="last is damaged: part: flipped"):
        read_whole(tmp_path / "last")
    about = (tmp_path / "last" / DAMAGED).stat()
    assert synced.files[about.st_ino] == about.st_size
    assert DAMAGED in synced.folders[(tmp_path / "last").stat().st_ino]


def test_another_checkpoint_of_the_name_is_not_marked(tmp_path: Path):
    saved(tmp_path / "last", "one")
    with pytest.raises(ReplacedError, match="last was replaced while it was loaded"):
        mark_damaged(tmp_path / "last", marker(8), Damage("part", "flipped"))
    assert content(tmp_path / "last") == "one"
    remove(tmp_path / "last")
    with pytest.raises(ReplacedError):
        mark_damaged(tmp_path / "last", marker(), Damage("part", "flipped"))
    assert latest(tmp_path) is None


def test_latest_skips_damaged_checkpoints_and_raises_if_all_are_damaged(tmp_path: Path):
    for number, name in enumerate(("step-1", "step-2")):
        saved(tmp_path / name, name, number)
    mark_damaged(tmp_path / "step-2", read(tmp_path / "step-2")[1], Damage("part", "flipped"))
    assert latest(tmp_path) == tmp_path / "step-1"
    mark_damaged(tmp_path / "step-1", read(tmp_path / "step-1")[1], Damage("part", "cut"))
    with pytest.raises(CorruptCheckpointError, match=r"all committed checkpoints are damaged: .*flipped"):
        latest(tmp_path)


def test_all_is_on_the_disk_with_the_parents_that_were_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced = Synced.record(monkeypatch)
    staged = StagedCheckpoint(tmp_path / "a" / "b" / "last", 0, 1, "job")
    staged.begin()
    staged.commit(marker(), Manifest({}))
    synced.check_committed(staged.path)
    synced.check_made(tmp_path / "a" / "b")
    synced.check_made(tmp_path / "a")


def test_a_step_of_a_checkpointer_is_read(tmp_path: Path):
    path = tmp_path / "step-0000000007"
    path.mkdir()
    said = {"step": 7, "world_size": 2, "run_id": "job", "prefix": "save", "sequence": 3}
    (path / MARKER).write_bytes(seal(said | {"order": 9, "committed_at": 5.0}))
    assert read(path) == (path, Marker("job", 0, 2, "save", 3, None, 9, 5.0))
    saved(tmp_path / "step-8", "")
    assert read(tmp_path / "step-8")[1].order == 10


def test_field_of_a_marker_that_is_not_known_is_ignored(tmp_path: Path):
    path = tmp_path / "step-7"
    path.mkdir()
    (path / MARKER).write_bytes(seal(asdict(marker()) | {"more": 1}))
    assert read(path) == (path, marker())


def test_a_folder_of_something_else_is_no_damaged_checkpoint(tmp_path: Path):
    for content in ('{"name": "an app"}', json.dumps({"format": 1}), ""):
        (tmp_path / "app").mkdir(exist_ok=True)
        (tmp_path / "app" / MANIFEST).write_text(content)
        assert latest(tmp_path) is None


def test_commit_beside_a_marker_that_cannot_be_read_comes_after_it(tmp_path: Path):
    for number, name in enumerate(("step-1", "step-2", "step-3")):
        saved(tmp_path / name, name, number)
    (tmp_path / "step-2" / MARKER).write_text("{")
    data = (tmp_path / "step-3" / MARKER).read_bytes()
    (tmp_path / "step-3" / MARKER).write_bytes(seal({"format": 2}))
    (tmp_path / "notes.txt").touch()
    (tmp_path / "logs").mkdir()
    saved(tmp_path / "step-1", "again", 3)
    (tmp_path / "step-3" / MARKER).write_bytes(data)
    assert read(tmp_path / "step-1")[1].order == 4
    assert latest(tmp_path) == tmp_path / "step-1"


def test_folder_of_another_user_keeps_no_commit_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "theirs").mkdir()
    read_bytes = Path.read_bytes

    def read_own(path: Path) -> bytes:
        if "theirs" in path.parts:
            raise PermissionError(errno.EACCES, "Permission denied")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read_own)
    monkeypatch.setattr(retry, "DELAYS", ())
    saved(tmp_path / "last", "one")
    assert read(tmp_path / "last")[1].order == 2, "theirs may be the first"


def test_io_error_at_the_marker_of_another_checkpoint_fails_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its place in the order cannot be known."""
    saved(tmp_path / "one", "one")
    staged = StagedCheckpoint(tmp_path / "two", 0, 2, "job")
    staged.begin()
    monkeypatch.setattr(Path, "read_bytes", raising(OSError, errno.ESTALE, "Stale file handle"))
    monkeypatch.setattr(retry, "DELAYS", (0.0,))
    with pytest.raises(OSError, match="Stale"):
        staged.commit(marker())
    assert not (tmp_path / "two").exists()
