"""A save without a coordinator fails for all ranks if one rank fails, hangs, gives up or is lost."""

import os
from typing import Any

import pytest

from lab.patience import PATIENCE
from muster.worker.decision import Decision, Failure, Outcome
from muster.worker.errors import (
    BarrierAbortedError,
    MemberLostError,
    MusterError,
    OutcomeUnknownError,
    RefusedError,
)
from muster.worker.integrations.commit.commitment import Commitment
from muster.worker.integrations.commit.words import BEGINS, DONE, GIVEN_UP, NOT_YET, REUSED
from tests.support.rendezvous_runs import in_thread
from tests.support.saves.scripted_barrier import ScriptedBarrier, decided
from tests.unit.worker.integrations.commit.scripted_saves import begun, written_by_all


@pytest.mark.parametrize("outcome", [Outcome.ABORTED, Outcome.MEMBER_LOST, Outcome.RELEASED])
def test_a_commit_that_fails_is_everyones_error(outcome: Outcome):
    save, barrier = written_by_all(rank=1)
    result = in_thread(save.confirmed)
    assert barrier.heard() == DONE
    barrier.answers.put(decided(outcome, rank_0=GIVEN_UP if outcome is Outcome.RELEASED else DONE))
    with pytest.raises(MusterError, match=r"is to blame|was given up"):
        result.result(PATIENCE)
    assert save.ending(PATIENCE) is not None


def test_a_failure_is_said_at_once(caplog: pytest.LogCaptureFixture):
    save, barrier = begun()
    save.failed("the disk is full")
    save.failed("and so on")
    assert barrier.heard() == "the disk is full"
    barrier.answers.put(decided(Outcome.ABORTED))
    save.join(PATIENCE)
    assert "not all ranks have written save 0: rank 1 (there, pid 7) is to blame" in caplog.text
    with pytest.raises(BarrierAbortedError):
        save.written()


def test_rank_missing_at_the_timeout_is_named_though_the_main_thread_hangs(caplog: pytest.LogCaptureFixture):
    barrier: Any = ScriptedBarrier()
    save = Commitment(barrier, 60.0)
    barrier.answers.put(decided(Outcome.TIMED_OUT))
    save.join(PATIENCE)
    assert "rank 1 (there, pid 7) is to blame" in caplog.text
    assert barrier.said.qsize() == 1, "there is nothing more to say"


@pytest.mark.parametrize(("on_lost", "aborted"), [("raise", 0), ("abort", 1)])
@pytest.mark.parametrize("outcome", [Outcome.MEMBER_LOST, Outcome.TIMED_OUT])
def test_a_lost_rank_ends_this_process_if_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, outcome: Outcome, on_lost: str, aborted: int
):
    calls: list[int] = []
    monkeypatch.setattr(os, "abort", lambda: calls.append(1))
    save, barrier = begun(on_lost=on_lost, pace=0.001)
    barrier.answers.put(decided(outcome))
    save.join(PATIENCE)
    assert len(calls) == aborted


def test_a_rank_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    monkeypatch.setattr(os, "abort", lambda: calls.append(1))
    save, barrier = begun(on_lost="abort", pace=0.001)
    barrier.answers.put(decided(Outcome.ABORTED))
    save.join(PATIENCE)
    assert calls == []


def test_rank_thrown_out_of_the_save_waits_to_hear_which_rank_is_lost():
    save, barrier = begun()
    save.give_up()
    assert barrier.heard() == GIVEN_UP
    assert save.ending(0.001) is None, "it is not known yet"
    barrier.answers.put(decided(Outcome.MEMBER_LOST))
    assert isinstance(save.ending(PATIENCE), MemberLostError)
    with pytest.raises(MemberLostError, match="is to blame"):
        save.written()


def test_if_no_rank_is_lost_the_ranks_that_gave_up_are_named():
    save, barrier = begun()
    result = in_thread(save.written)
    assert barrier.heard() == DONE
    barrier.answers.put(decided(rank_1=GIVEN_UP))
    with pytest.raises(MusterError, match=r"ended on ranks \[1\] before they were done"):
        result.result(PATIENCE)
    save.join(PATIENCE)
    assert barrier.said.empty(), "nothing is committed"


def test_while_the_coordinator_is_away_it_goes_on_asking():
    save, barrier = begun()
    result = in_thread(save.written)
    barrier.answers.put(OutcomeUnknownError("away", "checkpoint/dcp", 1, Outcome.UNKNOWN))
    assert [barrier.heard(), barrier.heard()] == [DONE, DONE]
    with pytest.raises(OutcomeUnknownError):
        result.result(PATIENCE)
    barrier.answers.put(decided())
    save.give_up()
    assert barrier.heard() == GIVEN_UP, "it did not hear that it was to commit"
    barrier.answers.put(decided(rank_0=GIVEN_UP))
    save.join(PATIENCE)


def test_a_refusal_is_told():
    barrier: Any = ScriptedBarrier()
    save = Commitment(barrier, 60.0)
    barrier.answers.put(RefusedError("rank 0 was evicted", "EVICTED"))
    with pytest.raises(RefusedError, match="evicted"):
        save.written()


def test_a_main_thread_that_hangs_is_overdue_and_named_to_all():
    barrier = ScriptedBarrier()
    as_barrier: Any = barrier
    save = Commitment(as_barrier, 0.5, pace=0.001)
    barrier.answers.put(decided())
    said = [barrier.heard()]
    while isinstance(said[-1], bytes):
        barrier.answers.put(decided(rank_0=NOT_YET))
        said.append(barrier.heard())
    assert said[-1] == "it has not done its part of the save for 0.5 s"
    assert set(said[1:-1]) == {NOT_YET}
    barrier.answers.put(decided(Outcome.ABORTED))
    save.join(PATIENCE)


def test_hung_rank_counts_as_lost_for_the_other_ranks(monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    monkeypatch.setattr(os, "abort", lambda: calls.append(1))
    save, barrier = begun(on_lost="abort", pace=0.001)
    reason = "it has not done its part of the save for 60 s"
    barrier.answers.put(
        Decision("checkpoint/dcp", 1, Outcome.ABORTED, reason, failures=(Failure(1, "there", 7, reason),))
    )
    save.join(PATIENCE)
    assert calls == [1]


def test_rank_0_does_not_end_in_the_midst_of_the_commit(monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    monkeypatch.setattr(os, "abort", lambda: calls.append(1))
    for rank, aborted in ((0, 0), (1, 1)):
        save, barrier = begun(rank, on_lost="abort")
        barrier.answers.put(decided())
        save.written()
        save.committed()
        barrier.answers.put(decided(Outcome.MEMBER_LOST))
        save.join(PATIENCE)
        assert len(calls) == aborted


@pytest.mark.parametrize("stage", ["begin", "written", "committed"])
def test_nothing_is_committed_where_another_rank_does_something_else(stage: str):
    barrier = ScriptedBarrier(rank=0)
    as_barrier: Any = barrier
    save = Commitment(as_barrier, 60.0)
    result = in_thread(save.written)
    for word in (BEGINS + REUSED, DONE)[: ("begin", "written", "committed").index(stage)]:
        assert barrier.heard() == word
        barrier.answers.put(decided())
    if stage == "committed":
        save.committed()
    barrier.answers.put(decided(rank_1=b"."))
    save.join(PATIENCE)
    with pytest.raises(MusterError, match=r"out of step in group \"checkpoint/dcp\" of run job: .* b'\.'"):
        save.confirmed() if stage == "committed" else result.result(PATIENCE)


def test_whatever_goes_wrong_in_its_thread_is_told():
    barrier: Any = ScriptedBarrier()
    save = Commitment(barrier, 60.0)
    barrier.answers.put(ZeroDivisionError("a fault"))
    with pytest.raises(MusterError, match="save 0 cannot be decided: ZeroDivisionError"):
        save.written()


def test_save_being_committed_is_not_late_and_failed_save_is_not_committed():
    save, barrier = written_by_all(rank=0)
    save.claim()
    save.committed()
    assert barrier.heard() == DONE
    barrier.answers.put(decided())
    save.join(PATIENCE)
    save, barrier = written_by_all(rank=0)
    save.failed("it took too long")
    with pytest.raises(
        MusterError, match="has failed for all ranks before it was committed: it took too long"
    ):
        save.claim()
    barrier.answers.put(decided(Outcome.ABORTED))
    save.join(PATIENCE)


@pytest.mark.parametrize("outcome", [Outcome.ABORTED, Outcome.MEMBER_LOST, Outcome.RELEASED])
def test_a_later_part_that_fails_is_everyones_error(outcome: Outcome):
    save, barrier = begun(rank=1, parts=2)
    first = in_thread(save.written)
    assert barrier.heard() == DONE
    barrier.answers.put(decided())
    first.result(PATIENCE)
    second = in_thread(save.written)
    assert barrier.heard() == DONE
    barrier.answers.put(decided(outcome, rank_0=GIVEN_UP if outcome is Outcome.RELEASED else DONE))
    with pytest.raises(MusterError, match=r"is to blame|was given up"):
        second.result(PATIENCE)
    save.join(PATIENCE)
    assert barrier.said.empty(), "nothing is committed"
    assert save.ending(PATIENCE) is not None


def test_a_rank_that_fails_at_a_later_part_says_so_to_all():
    save, barrier = begun(rank=1, parts=2)
    first = in_thread(save.written)
    assert barrier.heard() == DONE
    barrier.answers.put(decided())
    first.result(PATIENCE)
    save.failed("the disk cannot be read")
    assert barrier.heard() == "the disk cannot be read"
    barrier.answers.put(decided(Outcome.ABORTED))
    save.join(PATIENCE)
