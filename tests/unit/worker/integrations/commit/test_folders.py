"""Folders that all ranks commit and load without a coordinator: which rank arrives at which barrier."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lab.patience import PATIENCE
from muster.checkpoint.committed import MARKER
from muster.checkpoint.manifest import MANIFEST
from muster.worker.decision import Outcome
from muster.worker.errors import BarrierAbortedError, MemberLostError, MusterError, OutcomeUnknownError
from muster.worker.integrations.commit.contents import encoded, leave_note
from muster.worker.integrations.commit.folders import FolderSaves
from muster.worker.integrations.commit.lookup import read
from muster.worker.integrations.commit.numbered import newest
from muster.worker.integrations.commit.words import BEGINS
from tests.support.expect import raising
from tests.support.rendezvous_runs import in_thread
from tests.support.saves.scripted_barrier import ScriptedBarrier, decided
from tests.unit.worker.integrations.commit.folder_jobs import RANKS, Job, checkpoint_in, saves_of


def test_load_after_a_failed_save_waits_until_all_ranks_know_of_the_failure(tmp_path: Path):
    """Else it arrived at the barrier of the save that it says, by its other thread, has failed."""
    path = checkpoint_in(tmp_path)
    barrier = ScriptedBarrier(rank=1)
    saves, as_barrier = saves_of(barrier)

    def save_and_load() -> Path:
        with pytest.raises(OSError, match="No space left"):
            saves.save(as_barrier, tmp_path / "step-2", raising(OSError, 28, "No space left on device"))
        return saves.choose(as_barrier, tmp_path, lambda _: path)

    loaded = in_thread(save_and_load)
    assert barrier.heard() == BEGINS + b"step-2"
    barrier.answers.put(decided())
    failure = barrier.heard()
    assert isinstance(failure, str), "not the first word of its load"
    assert "No space left on device" in failure
    assert barrier.said.empty()
    barrier.answers.put(decided(Outcome.ABORTED))
    assert barrier.heard() == b"."
    barrier.answers.put(decided(rank_0=os.fsencode(path.name), rank_1=b"."))
    marker = barrier.heard()
    assert isinstance(marker, bytes)
    barrier.answers.put(decided(rank_0=marker, rank_1=marker))
    assert loaded.result(PATIENCE) == path


def test_nothing_is_loaded_where_others_make_a_save(tmp_path: Path):
    path = checkpoint_in(tmp_path)
    for rank, words in ((0, decided(rank_0=b".")), (1, decided(rank_1=b"."))):
        barrier = ScriptedBarrier(rank)
        saves, as_barrier = saves_of(barrier)
        barrier.answers.put(words)
        with pytest.raises(MusterError, match=r"out of step .* some make a save where others load"):
            saves.choose(as_barrier, tmp_path, lambda _: path)


def test_nothing_is_loaded_where_a_rank_sees_another_checkpoint(tmp_path: Path):
    path = checkpoint_in(tmp_path)
    barrier = ScriptedBarrier(rank=1)
    saves, as_barrier = saves_of(barrier)
    barrier.answers.put(decided(rank_0=os.fsencode(path.name), rank_1=b"."))
    barrier.answers.put(decided(rank_0=b"another", rank_1=repr(read(path)[1]).encode()))
    with pytest.raises(RuntimeError, match="is not the same checkpoint to all ranks"):
        saves.choose(as_barrier, tmp_path, lambda _: path)


@pytest.mark.parametrize("name", ["/elsewhere/step-1", "../elsewhere/step-1", ".."])
def test_name_that_leads_out_of_the_folder_is_not_loaded(tmp_path: Path, name: str):
    """A process that can speak as rank 0 chooses among the checkpoints of the job, and no other file."""
    name = name.replace("/elsewhere", str(tmp_path / "elsewhere")) if name.startswith("/") else name
    checkpoint_in(tmp_path / "elsewhere")
    checkpoint_in(tmp_path / "job")
    barrier = ScriptedBarrier(rank=1)
    saves, as_barrier = saves_of(barrier)
    barrier.answers.put(decided(rank_0=os.fsencode(name), rank_1=b"."))
    barrier.answers.put(decided(Outcome.ABORTED))
    with pytest.raises(ValueError, match="that is no name in a folder"):
        saves.choose(as_barrier, tmp_path / "job", lambda _: None)
    assert barrier.heard() == b"."
    assert "that is no name in a folder" in str(barrier.heard()), "the other ranks do not hear why"


def test_link_out_of_the_folder_is_not_loaded(tmp_path: Path):
    path = checkpoint_in(tmp_path / "elsewhere")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "step-1").symlink_to(path)
    heard = Job(tmp_path / "job").choose()
    assert all("is a link to" in str(one) and "outside of its folder" in str(one) for one in heard)


def test_link_that_the_script_names_is_followed(tmp_path: Path):
    path = checkpoint_in(tmp_path / "elsewhere")
    (tmp_path / "step-7").symlink_to(path)
    assert Job(tmp_path).choose_named(7) == [path] * RANKS


@pytest.mark.parametrize("rank", [0, 1])
def test_where_rank_0_finds_none_all_hear_that(rank: int):
    barrier = ScriptedBarrier(rank)
    saves, as_barrier = saves_of(barrier)
    barrier.answers.put(decided(rank_0=b"/", rank_1=b"."))
    assert saves.choose_any(as_barrier, Path(), lambda _: None) is None
    assert barrier.heard() == (b"/", b".")[rank]


def test_rank_0_alone_cannot_say_that_there_is_none(tmp_path: Path):
    path = checkpoint_in(tmp_path)
    job = Job(tmp_path)
    heard = job.each(
        lambda saves, member: saves.choose_any(
            member, tmp_path, lambda _: None, look=lambda _: newest(tmp_path, "step-")
        )
    )
    assert isinstance(heard[0], BarrierAbortedError)
    assert f"rank 0 finds no checkpoint, and rank 1 finds {path}" in str(heard[1])

    def look(_: object) -> None:
        return None

    found = job.each(lambda saves, member: saves.choose_any(member, tmp_path, look, look=look))
    assert found == [None] * RANKS


def saved_by_rank_0(barrier: ScriptedBarrier, folder: Path, others: Callable[[Path], None]) -> Future[None]:
    """Rank 0 saves; what the others do to the place where all write is the test's."""
    saves, as_barrier = saves_of(barrier)

    def write(unfinished: Path) -> None:
        unfinished.mkdir(parents=True, exist_ok=True)
        (unfinished / "weights").write_bytes(b"weights")
        others(unfinished.parent)

    for _ in range(4):
        barrier.answers.put(decided())
    return in_thread(lambda: saves.save(as_barrier, folder / "step-1", write))


def test_save_written_by_all_ranks_is_committed(tmp_path: Path):
    barrier = ScriptedBarrier(rank=0)

    def as_rank_1(place: Path) -> None:
        (place / ".part-1").touch()
        leave_note(place / "step-1", 1, encoded({}))

    saved_by_rank_0(barrier, tmp_path, as_rank_1).result(PATIENCE)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert read(tmp_path / "step-1")[1].world_size == 2
    assert {path.name for path in (tmp_path / "step-1").iterdir()} == {"weights", MARKER, MANIFEST}


def test_save_is_not_committed_if_a_rank_has_written_outside_the_shared_folder(tmp_path: Path):
    barrier = ScriptedBarrier(rank=0)
    saved = saved_by_rank_0(barrier, tmp_path, lambda _: None)
    with pytest.raises(
        OSError, match=r"what ranks \[1\] have written is not in .*: they do not share the folder"
    ):
        saved.result(PATIENCE)
    assert not (tmp_path / "step-1").exists()


def test_other_jobs_write_beside_it(tmp_path: Path):
    barriers = [ScriptedBarrier(rank=0), ScriptedBarrier(rank=0)]
    barriers[1].run_id = "another"
    places: list[Path] = []
    for barrier in barriers:
        for path in (tmp_path / "step-1",):
            saved_by_rank_0(barrier, tmp_path, places.append).exception(PATIENCE)
            assert not path.exists()
    assert len(set(places)) == 2


def test_checkpoint_that_one_rank_cannot_load_is_loaded_by_no_rank(tmp_path: Path):
    path = checkpoint_in(tmp_path)
    barrier = ScriptedBarrier(rank=1)
    saves, as_barrier = saves_of(barrier)
    barrier.answers.put(decided(Outcome.ABORTED))
    with pytest.raises(BarrierAbortedError, match="is to blame"):
        saves.choose(as_barrier, tmp_path, lambda _: path)


def test_ranks_that_the_framework_has_left_alone_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    saves = FolderSaves("checkpoint/folders", "folders", None, 60.0, "raise")
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2, and each of these ranks would train and save alone"):
        saves.meet(0, 1)


AWAY = OutcomeUnknownError("the coordinator is away", "save", 0, Outcome.UNKNOWN)


@pytest.mark.parametrize("barrier", [0, 1])
def test_choice_after_an_unknown_outcome_continues_or_asks_for_a_restart(job: Job, barrier: int):
    job.save(1)
    member = job.ranks[1][1]
    member.raises = {member.sequence + barrier: [AWAY]}

    def choose(saves: FolderSaves, member: Any) -> Path:
        find = partial(newest, job.folder, "step-")
        if member.rank == 1:
            with pytest.raises(OutcomeUnknownError):
                saves.choose(member, job.folder, find)
        try:
            return saves.choose(member, job.folder, find)
        finally:
            if member.rank == 1 and barrier:
                job.group.lose(1)

    heard = job.each(choose)
    if barrier:
        assert [type(one) for one in heard] == [MemberLostError, MusterError]
        assert "Restart the job on all ranks" in str(heard[1])
    else:
        assert heard == [job.folder / "step-1"] * RANKS
