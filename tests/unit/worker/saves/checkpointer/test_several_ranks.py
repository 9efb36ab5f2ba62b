"""Two ranks that share a folder: one begins late, fails or saves another step."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.patience import until
from muster.worker.decision import Decision
from muster.worker.errors import AsyncSaveError
from muster.worker.saves import Checkpointer
from tests.support.expect import raising
from tests.support.rendezvous_runs import in_thread
from tests.support.saves.child_processes import no_child_left
from tests.support.saves.fake_barrier import FakeBarrier
from tests.support.saves.fake_group import FakeGroup
from tests.unit.worker.saves.checkpointer.states import state


def test_barrier_of_some_ranks_is_refused(tmp_path: Path):
    barrier = FakeBarrier(world_size=2)
    barrier.participants = (0,)
    with pytest.raises(ValueError, match=r"has only ranks \[0\]"):
        Checkpointer(tmp_path, barrier=barrier)  # type: ignore[arg-type]


class Job:
    """Two ranks of one process.

    Args:
        folder: that they share.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.group = FakeGroup(2)
        self.ranks: list[Checkpointer] = []

    def rank(self, number: int) -> Checkpointer:
        made = Checkpointer(self.folder, barrier=self.group.member(number), timeout=30)  # type: ignore[arg-type]
        self.ranks.append(made)
        return made

    def heard(self) -> list[list[int] | str]:
        """What each rank hears of its next save: the steps, or the reason why it failed."""
        heard: list[list[int] | str] = []
        for rank in self.ranks:
            try:
                heard.append(rank.finalize(blocking=True))
            except AsyncSaveError as error:
                heard.append(str(error))
        return heard


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(Checkpointer, "_check_group", lambda _: None)
    with no_child_left():
        made = Job(tmp_path)
        yield made
        for rank in made.ranks:
            rank.close()


def test_rank_0_may_begin_last(job: Job):
    """It sweeps when it begins."""
    one = job.rank(1)
    saved = in_thread(lambda: one.save(1, state(1)))
    until(lambda: job.group.has_arrived(1, "save/plan", 0))
    job.rank(0).save(1, state(1))
    saved.result()
    assert job.heard() == [[1], [1]]


def test_save_that_rank_0_could_not_begin_leaves_no_files(job: Job, monkeypatch: pytest.MonkeyPatch):
    """The others, whose state is as before, have written their part."""
    zero, one = job.rank(0), job.rank(1)
    saved = in_thread(lambda: one.save(1, state(1)))
    zero.save(1, state(1))
    saved.result()
    assert job.heard() == [[1], [1]]
    with monkeypatch.context() as patched:
        patched.setattr(zero, "_stage", raising(MemoryError, "there is no room"))
        for step in (2, 3):
            one.save(step, state(step))
            until(lambda: one._queue._loop.ledger.saves()[0][0].write._request is None)
            with pytest.raises(MemoryError):
                zero.save(step, state(step))
            assert all("rank 0 failed: MemoryError" in heard for heard in job.heard())
    zero.close()
    assert [path.name for path in job.folder.iterdir()] == ["step-0000000001"]


def test_a_save_that_has_failed_before_it_is_planned_here_is_no_error_of_this_rank(
    job: Job, monkeypatch: pytest.MonkeyPatch
):
    """Rank 0 has swept it, since a third one has failed."""
    zero, one = job.rank(0), job.rank(1)
    plan = one._planning._negotiator._barrier
    vote = plan.vote

    def late(*arguments: Any) -> Decision:
        decision = vote(*arguments)
        if plan.sequence == 3:
            next(job.folder.glob(".step-*/.ranks/share-1")).unlink()
        return decision

    monkeypatch.setattr(plan, "vote", late)
    saved = in_thread(lambda: zero.save(1, state(1)))
    one.save(1, state(1))
    saved.result()
    for heard in job.heard():
        assert "rank 1 failed: it was not planned: step 1 has failed on another rank" in heard


def test_ranks_that_save_different_steps_are_told_to_save_the_same(job: Job):
    zero, one = job.rank(0), job.rank(1)
    saved = in_thread(lambda: one.save(1, state(1)))
    zero.save(1, state(1))
    saved.result()
    assert job.heard() == [[1], [1]]
    zero.save(2, state(2))
    one.save(3, state(3))
    for heard in job.heard():
        assert (
            "written-1, which another rank has written, is not there: all ranks must save the same" in heard
        )
    assert [path.name for path in job.folder.glob("step-*")] == ["step-0000000001"]


def test_ranks_that_torch_does_not_know_of_are_refused(tmp_path: Path):
    """Each would write the same file."""
    made = Checkpointer(tmp_path, barrier=FakeBarrier(world_size=2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="init_process_group"):
        made.save(1, state(1))
    made.close()
