"""One save of all ranks, without a coordinator: what is said for this rank, and what it is told."""

import os
from dataclasses import replace
from types import SimpleNamespace
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
from muster.worker.group_barrier import GroupBarrier
from muster.worker.groups.write_report import WriteReport
from muster.worker.integrations.commit import commitment as module
from muster.worker.integrations.commit.commitment import Commitment
from muster.worker.integrations.commit.words import BEGINS, DONE, GIVEN_UP, NOT_YET, REUSED, step_of
from tests.support.expect import some
from tests.support.meeting import in_thread
from tests.support.saves.scripted_barrier import FakeBarrier, decided


@pytest.fixture(autouse=True)
def _nobody_saved_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_last", {})
    monkeypatch.setattr(module, "_highest", {})


def begun(rank: int = 0, **arguments: Any) -> tuple[Commitment, FakeBarrier]:
    """A save that all ranks have begun."""
    barrier = FakeBarrier(rank)
    as_barrier: Any = barrier
    save = Commitment(as_barrier, 60.0, **arguments)
    assert barrier.heard() == BEGINS + REUSED
    barrier.answers.put(decided())
    return save, barrier


def test_signal_handler_may_end_a_save_that_is_not_made_yet(monkeypatch: pytest.MonkeyPatch):
    found: list[Commitment] = []

    def interrupted(group: object, name: bytes) -> bool:
        (last,) = module._last.values()
        last.give_up()
        last.check_reached()
        found.append(last)
        return False

    monkeypatch.setattr(module, "_goes_up", interrupted)
    save, _ = begun()
    assert found == [save]
    assert save.begun() == 0
    save.give_up()


def test_all_write_and_rank_0_commits():
    save, barrier = begun()
    result = in_thread(save.written)
    assert barrier.heard() == DONE
    barrier.answers.put(decided())
    assert result.result(PATIENCE).outcome is Outcome.RELEASED
    assert barrier.said.empty(), "it is not committed yet"
    save.committed()
    assert barrier.heard() == DONE
    barrier.answers.put(decided())
    save.join(PATIENCE)
    assert barrier.said.empty()


def test_another_rank_hears_of_the_commit_and_it_is_the_same_to_it_whether_its_writer_is_dropped():
    save, barrier = begun(rank=1)
    result = in_thread(save.written)
    assert barrier.heard() == DONE
    save.give_up()
    barrier.answers.put(decided())
    result.result(PATIENCE)
    for word in (NOT_YET, DONE):
        assert barrier.heard() == DONE
        barrier.answers.put(decided(rank_0=word))
    save.join(PATIENCE)
    assert barrier.said.empty()


def written_by_all(rank: int) -> tuple[Commitment, FakeBarrier]:
    save, barrier = begun(rank)
    result = in_thread(save.written)
    assert barrier.heard() == DONE
    barrier.answers.put(decided())
    result.result(PATIENCE)
    return save, barrier


def test_all_may_wait_for_the_commit():
    save, barrier = written_by_all(rank=1)
    result = in_thread(save.confirmed)
    assert barrier.heard() == DONE
    assert not result.done()
    barrier.answers.put(decided())
    result.result(PATIENCE)
    assert save.ending(PATIENCE) is None


@pytest.mark.parametrize("outcome", [Outcome.ABORTED, Outcome.MEMBER_LOST, Outcome.RELEASED])
def test_a_commit_that_fails_is_everyones_error(outcome: Outcome):
    save, barrier = written_by_all(rank=1)
    result = in_thread(save.confirmed)
    assert barrier.heard() == DONE
    barrier.answers.put(decided(outcome, rank_0=GIVEN_UP if outcome is Outcome.RELEASED else DONE))
    with pytest.raises(MusterError, match=r"is to blame|was given up"):
        result.result(PATIENCE)
    assert save.ending(PATIENCE) is not None


def test_each_vote_of_a_save_reports_its_step_and_the_last_one_commits(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    barrier = FakeBarrier()
    as_barrier: Any = barrier
    save = Commitment(as_barrier, 60.0, name="checkpoint-500")
    assert barrier.heard() == BEGINS + b"checkpoint-500"
    barrier.answers.put(decided(rank_0=BEGINS + b"checkpoint-500"))
    save.begun()
    now[0] += 12.5
    result = in_thread(save.written)
    assert barrier.heard() == DONE
    barrier.answers.put(decided())
    result.result(PATIENCE)
    save.committed()
    assert barrier.heard() == DONE
    barrier.answers.put(decided())
    save.join(PATIENCE)
    begin, written = WriteReport(step=500), WriteReport(step=500, seconds=12.5)
    assert barrier.reports == [begin, written, replace(written, commits=True)]


def test_rank_0_that_has_not_committed_yet_does_not_report_a_commit():
    save, barrier = begun(pace=0.001)
    result = in_thread(save.written)
    assert heard_at_last(barrier) == DONE
    barrier.answers.put(decided())
    result.result(PATIENCE)
    assert barrier.heard() == NOT_YET
    save.failed("the disk is full")
    barrier.answers.put(decided(rank_0=NOT_YET))
    assert heard_at_last(barrier) == "the disk is full"
    assert not any(some(report).commits for report in barrier.reports)
    barrier.answers.put(decided(Outcome.ABORTED))
    save.join(PATIENCE)


def test_rank_that_gives_up_reports_it():
    save, barrier = begun()
    save.give_up()
    assert barrier.heard() == GIVEN_UP
    barrier.answers.put(decided(rank_0=GIVEN_UP))
    save.join(PATIENCE)
    assert [some(report).gives_up for report in barrier.reports] == [False, True]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-9", 9),
        ("step 9", 9),
        ("checkpoint-500", 500),
        ("global_step0100", 100),
        ("epoch=1-step=500-v2.ckpt", 500),
        ("iter_0000500", 500),
        ("checkpoints-2026/step-7", 7),
        ("", None),
        ("final", None),
        ("epoch-3", None),
        ("2026-11-24", None),
        ("step-99999999999999999999", None),
    ],
)
def test_step_of_a_save_is_read_off_its_name(name: str, step: int | None):
    assert step_of(name) == step


def heard_at_last(barrier: FakeBarrier) -> bytes | str:
    """What it says when it does not say any more that it is not done."""
    while (said := barrier.heard()) == NOT_YET:
        barrier.answers.put(decided(rank_0=NOT_YET))
    return said


def test_who_takes_long_says_so_and_all_meet_again_until_all_have_written():
    save, barrier = begun(pace=0.001)
    assert barrier.heard() == NOT_YET
    result = in_thread(save.written)
    barrier.answers.put(decided(rank_0=NOT_YET))
    assert heard_at_last(barrier) == DONE
    barrier.answers.put(decided(rank_1=NOT_YET))
    assert not result.done()
    assert barrier.heard() == DONE
    barrier.answers.put(decided())
    assert result.result(PATIENCE).outcome is Outcome.RELEASED
    save.failed("the disk is full")
    assert heard_at_last(barrier) == "the disk is full", "rank 0 could not commit"
    barrier.answers.put(decided(Outcome.ABORTED))
    save.join(PATIENCE)


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


def test_who_never_came_is_named_though_the_main_thread_hangs(caplog: pytest.LogCaptureFixture):
    barrier: Any = FakeBarrier()
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


def test_who_is_thrown_out_of_the_save_waits_for_word_of_who_is_lost():
    save, barrier = begun()
    save.give_up()
    assert barrier.heard() == GIVEN_UP
    assert save.ending(0.001) is None, "it is not known yet"
    barrier.answers.put(decided(Outcome.MEMBER_LOST))
    assert isinstance(save.ending(PATIENCE), MemberLostError)
    with pytest.raises(MemberLostError, match="is to blame"):
        save.written()


def test_if_nobody_is_lost_those_who_gave_up_are_named():
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
    barrier: Any = FakeBarrier()
    save = Commitment(barrier, 60.0)
    barrier.answers.put(RefusedError("rank 0 was evicted", "EVICTED"))
    with pytest.raises(RefusedError, match="evicted"):
        save.written()


def another(barrier: FakeBarrier) -> Commitment:
    as_barrier: Any = barrier
    return Commitment(as_barrier, 60.0)


def test_who_was_thrown_out_of_a_save_and_begins_another_gives_it_up():
    _, barrier = begun()
    barrier.answers.put(decided(Outcome.MEMBER_LOST))
    second = another(barrier)
    assert barrier.heard() == GIVEN_UP
    assert second.number == 2
    barrier.answers.put(RefusedError("rank 0 was evicted", "EVICTED"))
    second.join(PATIENCE)


def test_the_same_if_the_thread_of_that_save_has_ended():
    first, barrier = in_thread(begun).result(PATIENCE)
    first.caller.join(PATIENCE)
    second = in_thread(lambda: another(barrier))
    assert barrier.heard() == GIVEN_UP
    barrier.answers.put(decided(Outcome.MEMBER_LOST))
    assert second.result(PATIENCE).number == 2
    barrier.answers.put(RefusedError("rank 0 was evicted", "EVICTED"))


def test_a_save_in_another_thread_is_waited_for():
    first, barrier = begun()
    second = in_thread(lambda: another(barrier))
    result = in_thread(first.written)
    assert barrier.heard() == DONE
    barrier.answers.put(decided())
    result.result(PATIENCE)
    assert not second.done()
    first.committed()
    assert barrier.heard() == DONE
    barrier.answers.put(decided())
    assert second.result(PATIENCE).number == 3
    barrier.answers.put(RefusedError("rank 0 was evicted", "EVICTED"))


def test_at_the_end_of_the_process_it_waits_for_the_last_word():
    save, barrier = begun()
    barrier.answers.put(decided(Outcome.MEMBER_LOST))
    module._hear_the_end()
    assert barrier.heard() == GIVEN_UP
    with pytest.raises(MemberLostError):
        save.written()


def test_what_becomes_of_the_process_is_one_of_two():
    barrier: Any = FakeBarrier()
    with pytest.raises(ValueError, match='on_lost = \'exit\': it must be "raise" or "abort"'):
        Commitment(barrier, 60.0, on_lost="exit")  # type: ignore[arg-type]


def test_a_main_thread_that_hangs_is_overdue_and_named_to_all():
    barrier = FakeBarrier()
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


def test_who_hangs_is_as_good_as_lost_to_the_others(monkeypatch: pytest.MonkeyPatch):
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


def test_it_asks_of_a_barrier_what_ours_has():
    for name in ("prefix", "world_size", "run_id", "generation", "rank", "sequence", "vote"):
        assert hasattr(GroupBarrier, name) or name in GroupBarrier.__doc__, name  # type: ignore[operator]


@pytest.mark.parametrize("stage", ["begin", "written", "committed"])
def test_nothing_is_committed_where_another_rank_does_something_else(stage: str):
    barrier = FakeBarrier(rank=0)
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


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("inf"), float("nan")])
def test_a_timeout_that_is_no_time_is_refused_before_anyone_waits(timeout: float):
    barrier: Any = FakeBarrier()
    with pytest.raises(ValueError, match=r"timeout = .*: it must be a number of seconds above 0"):
        Commitment(barrier, timeout)


def test_whatever_goes_wrong_in_its_thread_is_told():
    barrier: Any = FakeBarrier()
    save = Commitment(barrier, 60.0)
    barrier.answers.put(ZeroDivisionError("a fault"))
    with pytest.raises(MusterError, match="save 0 cannot be decided: ZeroDivisionError"):
        save.written()


def test_who_is_interrupted_while_he_waits_for_the_last_save_lets_the_next_one_wait_as_well(
    monkeypatch: pytest.MonkeyPatch,
):
    first, barrier = begun()
    join = first.join

    def interrupted(timeout: float | None = None) -> None:
        monkeypatch.setattr(first, "join", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(first, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        another(barrier)
    assert barrier.heard() == GIVEN_UP
    third = in_thread(lambda: another(barrier))
    assert not third.done()
    barrier.answers.put(decided(Outcome.MEMBER_LOST))
    assert third.result(PATIENCE).number == 2
    barrier.answers.put(RefusedError("rank 0 was evicted", "EVICTED"))


def test_nobody_waits_for_a_save_that_waits_for_a_coordinator_that_is_gone():
    first, barrier = begun()
    for _ in range(2):
        barrier.answers.put(OutcomeUnknownError("away", "checkpoint/dcp", 1, Outcome.UNKNOWN))
    with pytest.raises(OutcomeUnknownError):
        first.written()
    with pytest.raises(OutcomeUnknownError, match="away"):
        another(barrier)
    barrier.answers.put(decided(Outcome.MEMBER_LOST))
    first.join(PATIENCE)


def test_what_is_being_committed_is_not_late_and_what_has_failed_is_not_committed():
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


def test_no_rank_begins_a_part_before_all_have_done_the_one_before():
    save, barrier = begun(rank=1, parts=2)
    first = in_thread(save.written)
    assert barrier.heard() == DONE
    assert not first.done()
    barrier.answers.put(decided())
    first.result(PATIENCE)
    assert barrier.said.empty(), "the second part is not done yet"
    second = in_thread(save.written)
    assert barrier.heard() == DONE
    assert not second.done()
    barrier.answers.put(decided())
    assert second.result(PATIENCE).sequence > first.result(PATIENCE).sequence
    confirmed = in_thread(save.confirmed)
    assert barrier.heard() == DONE
    barrier.answers.put(decided())
    confirmed.result(PATIENCE)


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
