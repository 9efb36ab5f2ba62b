"""The voter answers each order by one event, whatever the functions of a save and the coordinator do."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from lab.patience import PATIENCE
from muster.worker.decision import Decision
from muster.worker.errors import AsyncSaveError, MusterError, RefusedError
from muster.worker.groups.write_report import WriteReport
from muster.worker.saves.queue.calls import Call
from muster.worker.saves.queue.effects import Await, Clean, Vote
from muster.worker.saves.queue.events import Cleaned, Decided, Event, OutcomeUnknown, WriteEnded
from muster.worker.saves.queue.voter import EARLY_WARNING, LATE_WARNING, Voter
from muster.worker.saves.request import AsyncRequest
from muster.worker.saves.writers.callers import Ending
from tests.support.expect import raising
from tests.support.saves.fake_barrier import FakeBarrier
from tests.unit.worker.saves.queue.queue_probes import gone


class CheckpointError(BaseException):
    """As torch's CheckpointException: no Exception."""


class FakeWrite:
    """A write that has ended."""

    pid = 7
    preload_seconds = start_seconds = 0.0

    def __init__(self, ending: Ending | BaseException) -> None:
        self._ending = ending
        self.timeouts: list[float] = []

    def wait(self, timeout: float) -> Ending:
        self.timeouts.append(timeout)
        if isinstance(self._ending, BaseException):
            raise self._ending
        return self._ending

    def abort(self, reason: str) -> None:
        raise AssertionError(reason)


class Traces:
    """Holds the saves that were decided."""

    def __init__(self) -> None:
        self.decided_saves: list[Call] = []

    def decided(self, call: Call) -> None:
        self.decided_saves.append(call)


@pytest.fixture
def barrier() -> FakeBarrier:
    return FakeBarrier(world_size=2)


@pytest.fixture
def commits() -> FakeBarrier:
    return FakeBarrier("save/commit", world_size=2)


@pytest.fixture
def traces() -> Traces:
    return Traces()


@pytest.fixture
def voter(barrier: FakeBarrier, commits: FakeBarrier, traces: Traces) -> Voter:
    return Voter(barrier, commits, 60.0, traces)  # type: ignore[arg-type]


def save(ending: Ending | BaseException | None = None, **arguments: Any) -> Call:
    made = Call(object(), AsyncRequest(None, (), []), "save 0", **arguments)
    made.write = None if ending is None else FakeWrite(ending)
    return made


ERRORS = [OSError("disk full"), CheckpointError("disk full"), KeyboardInterrupt("disk full")]


# ---------------------------------------------------------------------- the end of a write


def test_end_of_a_write_is_reported_with_its_failure_and_time(voter: Voter):
    call = save(Ending("the disk is full", 2.5))
    assert voter.carry_out(Await(call)) == WriteEnded(call, "the disk is full")
    assert call.seconds == 2.5
    assert isinstance(call.write, FakeWrite)
    assert call.write.timeouts == [60.0]


def test_save_without_a_write_has_ended_well(voter: Voter):
    call = save()
    assert voter.carry_out(Await(call)) == WriteEnded(call, None)


@pytest.mark.parametrize("error", ERRORS)
def test_write_that_cannot_be_judged_has_failed(voter: Voter, error: BaseException):
    calls: list[str] = []
    event = voter.carry_out(
        Await(save(error, on_written=lambda: calls.append("it may use its memory again")))
    )
    assert isinstance(event, WriteEnded)
    assert "disk full" in str(event.failure)
    assert calls == ["it may use its memory again"]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("failure", [None, "the writer was killed"])
def test_function_that_follows_a_write_and_fails_is_a_failure_unless_there_was_one(
    voter: Voter, error: BaseException, failure: str | None
):
    event = voter.carry_out(Await(save(Ending(failure, 1.0), on_written=raising(error))))
    assert isinstance(event, WriteEnded)
    assert (failure or "disk full") in str(event.failure)


# ---------------------------------------------------------------------- the vote


def test_save_that_all_have_written_is_committed(
    voter: Voter, barrier: FakeBarrier, commits: FakeBarrier, traces: Traces
):
    seen: list[Decision] = []
    call = save(commit=seen.append, word=lambda: b"no room", report=WriteReport(step=9))
    call.seconds = 2.5
    assert voter.carry_out(Vote(call, None, 3)) == Decided(call, None)
    assert (barrier.votes, commits.votes) == ([None], [None])
    assert barrier.said == [b"3 no room"]
    assert seen == [call.written]
    assert call.decision is not call.written
    assert traces.decided_saves == [call]
    (wrote,), (committed,) = barrier.reports, commits.reports
    assert wrote == WriteReport(step=9, seconds=2.5, commits=False)
    assert committed == WriteReport(step=9, seconds=2.5, commits=True)


def test_save_without_a_commit_is_decided_by_one_vote(
    voter: Voter, barrier: FakeBarrier, commits: FakeBarrier
):
    call = save()
    assert voter.carry_out(Vote(call, None, None)) == Decided(call, None)
    assert commits.votes == []
    assert barrier.reports == [WriteReport(seconds=0.0, commits=True)]


def test_failed_write_is_voted_without_its_word_and_never_committed(
    voter: Voter, barrier: FakeBarrier, commits: FakeBarrier
):
    call = save(commit=raising(AssertionError("committed")), word=raising(AssertionError("asked")))
    event = voter.carry_out(Vote(call, "the disk is full", None))
    assert isinstance(event, Decided)
    assert isinstance(event.error, AsyncSaveError)
    assert "was not committed, on any rank: rank 0 (here) failed: the disk is full" in str(event.error)
    assert (barrier.votes, commits.votes) == (["the disk is full"], [])


@pytest.mark.parametrize("error", ERRORS)
def test_commit_that_fails_is_voted_to_all(voter: Voter, commits: FakeBarrier, error: BaseException):
    event = voter.carry_out(Vote(save(commit=raising(error)), None, None))
    assert isinstance(event, Decided)
    assert "was written by every rank, but its commit failed" in str(event.error)
    (voted,) = commits.votes
    assert voted is not None
    assert "disk full" in voted


@pytest.mark.parametrize("commits_it", [True, False])
def test_ranks_that_make_different_saves_commit_none(
    voter: Voter, barrier: FakeBarrier, commits: FakeBarrier, commits_it: bool
):
    barrier.others_say[0] = b"1"
    commit = raising(AssertionError("committed")) if commits_it else None
    event = voter.carry_out(Vote(save(commit=commit), None, 2))
    assert isinstance(event, Decided)
    assert "the ranks aborted at different points" in str(event.error)
    if commits_it:
        assert "rank 0 has made 2 before this one, rank 1 1" in str(commits.votes[0])


@pytest.mark.parametrize("away_at", ["write", "commit"])
def test_vote_without_an_outcome_goes_on_where_it_was(
    voter: Voter, barrier: FakeBarrier, commits: FakeBarrier, traces: Traces, away_at: str
):
    error = gone()
    (barrier if away_at == "write" else commits).raises[0] = [error]
    made: list[Decision] = []
    call = save(commit=made.append)
    assert voter.carry_out(Vote(call, None, None)) == OutcomeUnknown(call, error)
    assert traces.decided_saves == []
    first = call.voted_at
    assert voter.carry_out(Vote(call, None, None)) == Decided(call, None)
    assert call.voted_at == first
    assert (barrier.votes, commits.votes, len(made)) == ([None], [None], 1), "nothing is voted or made twice"


def test_refusal_is_the_error_of_the_save(voter: Voter, barrier: FakeBarrier):
    refused = RefusedError("rank 0 was evicted", "EVICTED")
    barrier.raises[0] = [refused]
    call = save()
    assert voter.carry_out(Vote(call, None, None)) == Decided(call, refused)


@pytest.mark.parametrize("error", ERRORS)
def test_save_that_cannot_be_decided_has_an_error_and_the_next_one_is_decided(
    voter: Voter, error: BaseException
):
    event = voter.carry_out(Vote(save(word=raising(error)), None, None))
    assert isinstance(event, Decided)
    assert isinstance(event.error, MusterError)
    assert "save 0 cannot be decided: " in str(event.error)
    assert voter.carry_out(Vote(call := save(), None, None)) == Decided(call, None)


def test_first_vote_warns_early_and_later_ones_when_a_writer_may_hang(voter: Voter, barrier: FakeBarrier):
    for seconds in (2.5, 100.0):
        call = save()
        call.seconds = seconds
        voter.carry_out(Vote(call, None, None))
    first, second = barrier.early
    assert first is not None
    assert second is not None
    assert (first.after, second.after) == (EARLY_WARNING + 2.5, LATE_WARNING)


# ---------------------------------------------------------------------- the rest


@pytest.mark.parametrize("on_decided", [None, *(raising(error) for error in ERRORS)])
def test_clean_save_holds_nothing_of_its_queue(voter: Voter, on_decided: Callable[[], None] | None):
    call = save(on_decided=on_decided, commit=raising(AssertionError("committed")), word=lambda: b"word")
    assert voter.carry_out(Clean(call)) == Cleaned(call)
    assert (call.owner, call.on_decided, call.commit, call.word()) == (None, None, None, b"")


def test_orders_are_served_in_turn_until_the_thread_is_told_to_end(voter: Voter):
    answers: list[Event] = []
    first, second = save(), save()
    for order in (Await(first), Await(second), Clean(first), None):
        voter.orders.put(order)
    thread = threading.Thread(target=voter.serve, args=(answers.append,), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert answers == [WriteEnded(first, None), WriteEnded(second, None), Cleaned(first)]
