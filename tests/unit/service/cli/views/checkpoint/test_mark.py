"""``muster checkpoint mark``: marks are made, shown and taken back."""

import json
from pathlib import Path

import pytest

from muster.checkpoint.bucket.fsspec_objects import FsspecObjects
from muster.checkpoint.bucket.protocol import CheckpointBucket
from muster.checkpoint.committed import MARKER, SaveAttempt
from muster.checkpoint.damage import KEPT
from muster.checkpoint.manifest import MANIFEST
from muster.service.cli.failure import Exit
from tests.support.expect import raising
from tests.support.saves.stored_checkpoints import ITEMS, in_bucket, in_folder
from tests.unit.service.cli.views.checkpoint.commands import run


def test_marks_are_made_and_taken_back(tmp_path: Path):
    path = in_folder(tmp_path, 100)
    made = run("mark", tmp_path, "--corrupt", 100, "--reason", "a bad disk").stdout
    assert made.startswith(
        f"step 100 ({path}) is marked as damaged, and no job resumes from it: a bad disk; "
    )
    assert "is marked as damaged already: a bad disk" in run("mark", tmp_path, "--corrupt=100").stdout
    assert "is kept, and retention" in run("mark", tmp_path, "--keep", 100).stdout
    assert "is kept already" in run("mark", tmp_path, "--keep", 100).stdout
    shown = json.loads(run("list", tmp_path, "-o", "json").stdout)["checkpoints"][0]
    assert (shown["state"], shown["kept"], shown["marked_damaged"]) == ("DAMAGED", True, True)
    assert shown["damage"]["reason"].startswith("a bad disk; marked by ")
    assert "not marked as damaged and kept any more" in run("mark", tmp_path, "--clear", 100).stdout
    assert "has no mark" in run("mark", tmp_path, "--clear", 100).stdout
    assert sorted(one.name for one in path.iterdir()) == [*ITEMS, MARKER, MANIFEST]


def test_mark_shows_the_new_state_of_the_checkpoint_in_json(tmp_path: Path):
    in_folder(tmp_path, 100)
    shown = json.loads(run("mark", tmp_path, "--keep", 100, "-o", "json").stdout)
    assert (shown["step"], shown["kept"]) == (100, True)


def test_checkpoint_with_a_garbage_marker_can_be_marked(tmp_path: Path):
    (in_folder(tmp_path, 100) / MARKER).write_bytes(b"{")
    run("mark", tmp_path, "--keep", 100)
    run("mark", tmp_path, "--corrupt", 100)
    assert (tmp_path / "step-0000000100" / KEPT).exists()
    run("mark", tmp_path, "--clear", 100)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--corrupt=1", "--keep=1"),
        ("--keep=1", "--clear=1"),
        ("--keep=1", "--reason=why"),
        ("--keep=-1",),
        ("--corrupt=one",),
    ],
)
def test_mark_wants_one_of_its_options(tmp_path: Path, arguments: tuple[str, ...]):
    in_folder(tmp_path, 1)
    assert run("mark", tmp_path, *arguments, code=Exit.USAGE).stdout == ""


def test_step_that_several_checkpoints_have_is_marked_by_its_path(objects: FsspecObjects):
    bucket = CheckpointBucket(objects, objects.url, "job1")
    attempts = [
        in_bucket(objects, 100, save=SaveAttempt(generation, 0), bucket=bucket) for generation in (0, 1)
    ]
    result = run("mark", objects.url, "--keep", 100, code=Exit.USAGE)
    assert all(f"\n  {objects.url}/{attempt.name}" in result.stderr for attempt in attempts)
    run("mark", f"{objects.url}/{attempts[0].name}", "--keep", 100)
    shown = json.loads(run("list", objects.url, "-o", "json").stdout)["checkpoints"]
    assert {one["name"]: one["kept"] for one in shown} == {attempts[0].name: True, attempts[1].name: False}


def test_mark_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = in_folder(tmp_path, 100)
    monkeypatch.setattr("muster.checkpoint.inventory.mark", raising(PermissionError, "Permission denied"))
    result = run("mark", tmp_path, "--keep", 100, code=Exit.FAILED)
    assert f"Error: {path} cannot be marked: Permission denied\n  next: " in result.stderr
