"""Folders that all ranks commit, without a coordinator: who arrives at which barrier."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from muster.worker.decision import Outcome
from muster.worker.errors import BarrierAbortedError, MusterError
from muster.worker.integrations import commitment as module
from muster.worker.integrations.aside import Aside, Marker, read
from muster.worker.integrations.commitment import BEGINS
from muster.worker.integrations.folders import FolderSaves, committed, rotate
from tests.support.fake_barrier import FakeBarrier, decided
from tests.support.meeting import in_thread
from tests.support.patience import PATIENCE


@pytest.fixture(autouse=True)
def _nobody_saved_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_last", {})
    monkeypatch.setattr(module, "_highest", {})


def saves_of(barrier: FakeBarrier) -> tuple[FolderSaves, Any]:
    as_barrier: Any = barrier
    return FolderSaves("checkpoint/folders", "folders", as_barrier, 60.0, "raise"), as_barrier


def checkpoint_in(folder: Path) -> Path:
    """One that all ranks have committed."""
    aside = Aside(folder / "step-1", 0, 0, "folders")
    aside.prepare()
    aside.unfinished.mkdir(exist_ok=True)
    (aside.unfinished / "weights").write_bytes(b"weights")
    aside.commit(Marker("job", 0, 2, "checkpoint/folders", 0))
    return aside.path


def test_a_rank_whose_save_fails_loads_when_that_is_known_to_all(tmp_path: Path):
    """Else it arrived at the barrier of the save that it says, by its other thread, has failed."""
    path = checkpoint_in(tmp_path)
    barrier = FakeBarrier(rank=1)
    saves, as_barrier = saves_of(barrier)

    def write(_: Path) -> None:
        raise OSError(28, "No space left on device")

    def save_and_load() -> Path:
        with pytest.raises(OSError, match="No space left"):
            saves.save(as_barrier, tmp_path / "step-2", write)
        return saves.choose(as_barrier, lambda: path)

    loaded = in_thread(save_and_load)
    assert barrier.heard() == BEGINS + b"step-2"
    barrier.answers.put(decided())
    failure = barrier.heard()
    assert isinstance(failure, str), "not the first word of its load"
    assert "No space left on device" in failure
    assert barrier.said.empty()
    barrier.answers.put(decided(Outcome.ABORTED))
    assert barrier.heard() == b"."
    barrier.answers.put(decided(rank_0=os.fsencode(path), rank_1=b"."))
    marker = barrier.heard()
    assert isinstance(marker, bytes)
    barrier.answers.put(decided(rank_0=marker, rank_1=marker))
    assert loaded.result(PATIENCE) == path


def test_nothing_is_loaded_where_others_make_a_save(tmp_path: Path):
    path = checkpoint_in(tmp_path)
    for rank, words in ((0, decided(rank_0=b".")), (1, decided(rank_1=b"."))):
        barrier = FakeBarrier(rank)
        saves, as_barrier = saves_of(barrier)
        barrier.answers.put(words)
        with pytest.raises(MusterError, match=r"out of step .* some make a save where others load"):
            saves.choose(as_barrier, lambda: path)


def test_nothing_is_loaded_where_a_rank_sees_another_checkpoint(tmp_path: Path):
    path = checkpoint_in(tmp_path)
    barrier = FakeBarrier(rank=1)
    saves, as_barrier = saves_of(barrier)
    barrier.answers.put(decided(rank_0=os.fsencode(path), rank_1=b"."))
    barrier.answers.put(decided(rank_0=b"another", rank_1=repr(read(path)[1]).encode()))
    with pytest.raises(RuntimeError, match="is not the same checkpoint to all ranks"):
        saves.choose(as_barrier, lambda: path)


@pytest.mark.parametrize("rank", [0, 1])
def test_where_rank_0_finds_none_all_hear_that(rank: int):
    barrier = FakeBarrier(rank)
    saves, as_barrier = saves_of(barrier)
    barrier.answers.put(decided(rank_0=b"/", rank_1=b"."))
    assert saves.choose_any(as_barrier, lambda: None) is None
    assert barrier.heard() == (b"/", b".")[rank]


def saved_by_rank_0(barrier: FakeBarrier, folder: Path, others: Callable[[Path], None]) -> Future[None]:
    """Rank 0 saves; what the others do to the place where all write is the test's."""
    saves, as_barrier = saves_of(barrier)

    def write(unfinished: Path) -> None:
        unfinished.mkdir(parents=True, exist_ok=True)
        (unfinished / "weights").write_bytes(b"weights")
        others(unfinished.parent)

    for _ in range(3):
        barrier.answers.put(decided())
    return in_thread(lambda: saves.save(as_barrier, folder / "step-1", write))


def test_what_all_have_written_is_committed(tmp_path: Path):
    barrier = FakeBarrier(rank=0)
    saved_by_rank_0(barrier, tmp_path, lambda place: (place / ".part-1").touch()).result(PATIENCE)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert read(tmp_path / "step-1")[1].world_size == 2
    assert not list((tmp_path / "step-1").glob(".part*"))


def test_what_a_rank_has_written_elsewhere_is_not_committed_whatever_it_says(tmp_path: Path):
    barrier = FakeBarrier(rank=0)
    saved = saved_by_rank_0(barrier, tmp_path, lambda _: None)
    with pytest.raises(
        OSError, match=r"what ranks \[1\] have written is not in .*: they do not share the folder"
    ):
        saved.result(PATIENCE)
    assert not (tmp_path / "step-1").exists()


def test_other_jobs_write_beside_it(tmp_path: Path):
    barriers = [FakeBarrier(rank=0), FakeBarrier(rank=0)]
    barriers[1].run_id = "another"
    places: list[Path] = []
    for barrier in barriers:
        for path in (tmp_path / "step-1",):
            saved_by_rank_0(barrier, tmp_path, places.append).exception(PATIENCE)
            assert not path.exists()
    assert len(set(places)) == 2


def test_rotation_keeps_what_was_committed_last_whatever_its_number(tmp_path: Path):
    made: list[Path] = []
    for number in (5, 6, 0):
        aside = Aside(tmp_path / f"checkpoint_{number}", 0, number, "folders")
        aside.begin()
        aside.commit(Marker("job", 0, 2, "checkpoint/folders", 0))
        os.utime(aside.path / "committed.json", (len(made), len(made)))
        made.append(aside.path)
    rotate(committed(tmp_path, "checkpoint_"), 2, {made[-1]})
    assert [path.exists() for path in made] == [False, True, True]
    rotate(committed(tmp_path, "checkpoint_"), 1, {made[1], made[-1]})
    assert [path.exists() for path in made] == [False, True, True]


def test_what_one_rank_cannot_load_none_does(tmp_path: Path):
    path = checkpoint_in(tmp_path)
    barrier = FakeBarrier(rank=1)
    saves, as_barrier = saves_of(barrier)
    barrier.answers.put(decided(Outcome.ABORTED))
    with pytest.raises(BarrierAbortedError, match="is to blame"):
        saves.choose(as_barrier, lambda: path)


def test_ranks_that_the_framework_has_left_alone_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    saves = FolderSaves("checkpoint/folders", "folders", None, 60.0, "raise")
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2, and each of these ranks would train and save alone"):
        saves.meet(0, 1)
