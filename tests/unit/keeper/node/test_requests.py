"""The runs whose ranks ask for a keeper on this node."""

import os
import time
from pathlib import Path

from muster.checkpoint.local_folder import REQUEST, run_folder
from muster.keeper.node.requests import remove_run, requested_runs, sweep, was_requested
from muster.worker.saves.local.folder import LocalFolder


def test_run_is_found_as_soon_as_a_rank_has_made_its_folder(tmp_path: Path):
    assert requested_runs(tmp_path, ["*"]) == []
    folder = LocalFolder(tmp_path, "team-a/job 1")
    folder.make()
    folder.make()
    assert requested_runs(tmp_path, ["*"]) == ["team-a/job 1"]
    assert run_folder(tmp_path, "team-a/job 1") == folder.path


def test_runs_that_match_no_pattern_are_left_out(tmp_path: Path):
    for run_id in ("team-a.1", "team-b.1", "other"):
        LocalFolder(tmp_path, run_id).make()
    assert set(requested_runs(tmp_path, ["team-a.*", "oth*"])) == {"team-a.1", "other"}


def test_request_that_is_not_in_its_runs_folder_is_ignored(tmp_path: Path):
    LocalFolder(tmp_path, "mine").make()
    (run_folder(tmp_path, "mine") / REQUEST).write_text("another")
    assert requested_runs(tmp_path, ["*"]) == []


def test_request_that_cannot_be_read_is_ignored(tmp_path: Path):
    for run_id in ("a", "b"):
        LocalFolder(tmp_path, run_id).make()
    (run_folder(tmp_path, "a") / REQUEST).write_bytes(b"\xff\xfe")
    assert requested_runs(tmp_path, ["*"]) == ["b"]


def test_request_is_new_again_when_a_rank_repeats_it(tmp_path: Path):
    folder = LocalFolder(tmp_path, "mine")
    assert not was_requested(tmp_path, "mine", 60)
    folder.make()
    hour_ago = time.time() - 3600
    os.utime(folder.path / REQUEST, (hour_ago, hour_ago))
    assert not was_requested(tmp_path, "mine", 60)
    folder.make()
    assert was_requested(tmp_path, "mine", 60)


def test_removed_run_leaves_nothing(tmp_path: Path):
    folder = LocalFolder(tmp_path, "mine")
    folder.make()
    (folder.path / "0-0").mkdir()
    (folder.path / "0-0" / "part").write_text("bytes")
    remove_run(tmp_path, "mine")
    assert list(tmp_path.iterdir()) == []


def test_removal_that_was_broken_off_is_finished(tmp_path: Path):
    folder = LocalFolder(tmp_path, "mine")
    folder.make()
    folder.path.rename(tmp_path / f".removed-{folder.path.name}")
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []
