"""Retention removes the checkpoints that were committed first, and a start sweeps unfinished saves."""

from pathlib import Path
from zlib import crc32

import pytest

from muster.worker.saves import Checkpointer, SaveTimings
from tests.support.saves.fake_barrier import FakeBarrier
from tests.unit.worker.saves.checkpointer.states import hurt, save_steps, state


def test_the_last_ones_are_kept(tmp_path: Path, barrier: FakeBarrier):
    heard: list[SaveTimings] = []
    made = Checkpointer(tmp_path, keep_last=2, barrier=barrier, on_saved=heard.append)  # type: ignore[arg-type]
    for step in range(5):
        made.save(step, state(step))
    made.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000000003", "step-0000000004"]
    assert [one.call_idx for one in heard] == [0, 1, 2, 3, 4]


def test_leftovers_of_another_life_are_swept_at_the_start(tmp_path: Path, barrier: FakeBarrier):
    (tmp_path / ".step-0000000001.0-0").mkdir()
    (tmp_path / ".removed-step-0000000001").mkdir()
    Checkpointer(tmp_path, barrier=barrier).close()  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_save_that_other_ranks_have_begun_to_write_is_not_swept(made: Checkpointer, tmp_path: Path):
    """They may be ahead: their children write the next save while this rank still commits the last one."""
    theirs = tmp_path / f".step-0000000002.0-1-{crc32(b'job'):08x}"
    theirs.mkdir()
    (theirs / "__1_0.distcp").touch()
    made.save(1, state(1))
    assert made.finalize(blocking=True) == [1]
    assert [path.name for path in theirs.iterdir()] == ["__1_0.distcp"]


def test_retention_follows_the_order_of_commits(tmp_path: Path, barrier: FakeBarrier):
    made = Checkpointer(tmp_path, keep_last=3, barrier=barrier)  # type: ignore[arg-type]
    save_steps(made, 80, 90, 100)
    assert made.load(state(0), tmp_path / "step-0000000080").step == 80
    save_steps(made, 60)
    made.close()
    assert sorted(int(path.name[5:]) for path in tmp_path.iterdir()) == [60, 90, 100]
    latest = made.latest()
    assert latest is not None
    assert latest.step == 60


def test_retention_counts_whole_checkpoints_only(tmp_path: Path, barrier: FakeBarrier):
    made = Checkpointer(tmp_path, keep_last=2, barrier=barrier)  # type: ignore[arg-type]
    save_steps(made, 1, 2, 3)
    hurt(tmp_path / "step-0000000003" / "__0_0.distcp", "flipped")
    assert made.load(state(0)).step == 2
    save_steps(made, 4)
    assert sorted(int(path.name[5:]) for path in tmp_path.iterdir()) == [2, 3, 4]
    save_steps(made, 5)
    made.close()
    assert sorted(int(path.name[5:]) for path in tmp_path.iterdir()) == [4, 5]


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_refused(keep: int, tmp_path: Path):
    with pytest.raises(ValueError, match="keep_last"):
        Checkpointer(tmp_path, keep_last=keep, barrier=FakeBarrier())  # type: ignore[arg-type]


def test_nothing_committed_is_removed_before_it_is_known_to_be_whole(tmp_path: Path, barrier: FakeBarrier):
    """The process was killed between a commit and what it was to remove then; the newest is damaged now."""
    made = Checkpointer(tmp_path, keep_last=2, barrier=barrier)  # type: ignore[arg-type]
    save_steps(made, 1, 2)
    made.close()
    hurt(tmp_path / "step-0000000002" / "__0_0.distcp", "flipped")
    again = Checkpointer(tmp_path, keep_last=1, barrier=barrier)  # type: ignore[arg-type]
    assert again.load(state(0)).step == 1
    again.close()
