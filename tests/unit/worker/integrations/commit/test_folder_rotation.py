"""Rotation removes the oldest committed folders, and keeps those that are needed or marked."""

import errno
import os
from pathlib import Path

import pytest

from muster.checkpoint.committed import MARKER
from muster.checkpoint.damage import KEPT, Damage
from muster.worker.integrations.commit import numbered as module
from muster.worker.integrations.commit.lookup import Marker, mark_damaged, read
from muster.worker.integrations.commit.numbered import newest, numbered, rotate
from muster.worker.integrations.commit.staged_checkpoint import StagedCheckpoint
from tests.unit.worker.integrations.commit.folder_jobs import Job, checkpoint_in


def test_rotation_keeps_the_last_commits_whatever_their_numbers(tmp_path: Path):
    made: list[Path] = []
    for number in (5, 6, 0):
        staged = StagedCheckpoint(tmp_path / f"checkpoint_{number}", 0, number, "job", "folders")
        staged.begin()
        staged.commit(Marker("job", 0, 2, "checkpoint/folders", 0))
        os.utime(staged.path / MARKER, (-len(made), -len(made)))  # As a copy has another time.
        made.append(staged.path)
    assert [one.found.marker.order for one in numbered(tmp_path, "checkpoint_") if one.found.marker] == [
        1,
        2,
        3,
    ]
    assert newest(tmp_path, "checkpoint_") == made[-1]
    rotate(tmp_path, "checkpoint_", 2, {made[-1]})
    assert [path.exists() for path in made] == [False, True, True]
    rotate(tmp_path, "checkpoint_", 1, {made[1], made[-1]})
    assert [path.exists() for path in made] == [False, True, True]


def test_a_damaged_checkpoint_does_not_count_and_goes_when_it_is_outdated(tmp_path: Path):
    made: list[Path] = []
    for number in range(4):
        staged = StagedCheckpoint(tmp_path / f"step-{number}", 0, number, "job", "folders")
        staged.begin()
        staged.commit(Marker("job", 0, 2, "checkpoint/folders", 0))
        os.utime(staged.path / MARKER, (-number, -number))
        made.append(staged.path)
    mark_damaged(made[1], read(made[1])[1], Damage("weights", "flipped"))
    rotate(tmp_path, "step-", 3, set())
    assert [path.exists() for path in made] == [True] * 4, "three whole ones"
    rotate(tmp_path, "step-", 2, set())
    assert [path.exists() for path in made] == [False, False, True, True]


def test_checkpoint_that_is_marked_as_kept_is_not_removed(tmp_path: Path):
    made: list[Path] = []
    for number in range(5):
        staged = StagedCheckpoint(tmp_path / f"step-{number}", 0, number, "job", "folders")
        staged.begin()
        staged.commit(Marker("job", 0, 2, "checkpoint/folders", 0))
        made.append(staged.path)
    mark_damaged(made[1], read(made[1])[1], Damage("weights", "flipped"))
    for path in (made[0], made[1]):
        (path / KEPT).touch()
    rotate(tmp_path, "step-", 1, set())
    assert [path.exists() for path in made] == [True, True, False, False, True]


def test_rotation_that_fails_does_not_stop_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    checkpoint_in(tmp_path)
    monkeypatch.setattr(module, "entries", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    rotate(tmp_path, "step-", 1, set())
    assert "are not removed" in caplog.text


def test_a_damaged_checkpoint_that_has_lost_its_marker_goes_as_well(job: Job):
    for number in (1, 2):
        job.save(number)
    (job.folder / "step-1" / MARKER).unlink()
    rotate(job.folder, "step-", 2, set())
    assert (job.folder / "step-1").exists()
    rotate(job.folder, "step-", 1, set())
    assert not (job.folder / "step-1").exists()
