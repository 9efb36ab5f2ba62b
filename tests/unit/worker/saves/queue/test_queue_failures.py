"""A save that fails on one rank fails on all, and the queue goes on with the next one."""

import signal
import threading
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from lab.patience import PATIENCE, until
from muster.worker.decision import Decision
from muster.worker.errors import AsyncSaveError, MusterError, OutcomeUnknownError
from muster.worker.saves import AsyncCallsQueue, AsyncRequest
from muster.worker.saves.queue.ledger import Ledger
from tests.support.expect import raising
from tests.support.saves.child_processes import no_child_left, no_file_left
from tests.support.saves.fake_barrier import FakeBarrier
from tests.unit.worker.saves.queue.queue_probes import away_until_closing, decided, gone, kill_itself, nothing


def test_a_failed_save_is_finalized_nowhere_and_later_ones_are(queue: AsyncCallsQueue, barrier: FakeBarrier):
    done: list[int] = []
    for number, write in enumerate((nothing, kill_itself, nothing)):
        queue.schedule_async_request(AsyncRequest(write, (), [partial(done.append, number)]))
    with pytest.raises(AsyncSaveError, match=r"save 1 was not committed, on any rank.*SIGKILL") as caught:
        queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
    assert (caught.value.call_idx, caught.value.finalized, done) == (1, (0,), [0])
    assert [one.rank for one in caught.value.failures] == [0]
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [2]
    assert done == [0, 2]


def test_another_ranks_failure_is_ours_too(queue: AsyncCallsQueue, barrier: FakeBarrier):
    done: list[int] = []
    barrier.others_fail[0] = "disk full"
    queue.schedule_async_request(AsyncRequest(nothing, (), [lambda: done.append(1)]))
    with pytest.raises(AsyncSaveError, match=r"rank 1 \(there\) failed: disk full"):
        queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
    assert done == []


def test_a_child_that_takes_too_long_is_ended(barrier: FakeBarrier):
    with no_child_left():
        queue = AsyncCallsQueue(barrier=barrier, timeout=0.2)  # type: ignore[arg-type]
        queue.schedule_async_request(AsyncRequest(signal.pause, (), []))
        with pytest.raises(AsyncSaveError, match=r"had not ended after 0.2 s"):
            queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        queue.close()


def test_a_save_that_cannot_be_begun_counts_and_fails_for_all(queue: AsyncCallsQueue, barrier: FakeBarrier):
    with pytest.raises(MemoryError):
        queue.schedule_async_request(
            AsyncRequest(nothing, (), [], preload_fn=raising(MemoryError, "no room for the copy"))
        )
    assert queue.schedule_async_request(AsyncRequest(nothing, (), [])) == 1
    with pytest.raises(AsyncSaveError, match="no room for the copy") as caught:
        queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
    assert caught.value.call_idx == 0
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [1]
    assert [vote is None for vote in barrier.votes] == [False, True]


def test_a_failure_of_what_follows_the_write_is_a_vote_too(queue: AsyncCallsQueue, barrier: FakeBarrier):
    queue.schedule_async_request(
        AsyncRequest(nothing, (), []), on_written=raising(ValueError, "buffers are gone")
    )
    with pytest.raises(AsyncSaveError, match="buffers are gone"):
        queue.maybe_finalize_async_calls(blocking=True, no_dist=True)


def test_on_written_is_called_however_the_write_ended(queue: AsyncCallsQueue):
    called: list[int] = []
    queue.schedule_async_request(AsyncRequest(kill_itself, (), []), on_written=lambda: called.append(1))
    with pytest.raises(AsyncSaveError):
        queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
    assert called == [1]


def test_a_commit_that_fails_fails_for_all(queue: AsyncCallsQueue, barrier: FakeBarrier):
    done: list[int] = []
    request = AsyncRequest(nothing, (), [lambda: done.append(1)])
    queue.schedule_async_request(request, commit=raising(OSError, "cannot rename"))
    with pytest.raises(AsyncSaveError, match=r"written by every rank, but.*cannot rename"):
        queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
    assert done == []


def test_nothing_is_committed_that_a_rank_failed_to_write(queue: AsyncCallsQueue, barrier: FakeBarrier):
    committed: list[int] = []
    barrier.others_fail[0] = "disk full"
    queue.schedule_async_request(AsyncRequest(nothing, (), []), commit=lambda _: committed.append(1))
    with pytest.raises(AsyncSaveError):
        queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
    assert (committed, barrier.siblings["save/commit"].votes) == ([], [])


def test_an_unknown_outcome_is_asked_for_again(queue: AsyncCallsQueue, barrier: FakeBarrier):
    barrier.raises[0] = [gone() for _ in range(2)]
    queue.schedule_async_request(AsyncRequest(nothing, (), []))
    until(lambda: decided(queue) == 1)
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [0]


def test_waiting_caller_is_told_that_the_coordinator_is_away_and_may_wait_again(barrier: FakeBarrier):
    away, back = threading.Event(), threading.Event()
    vote = barrier.vote

    def vote_later(*arguments: Any, **options: Any) -> Decision:
        if not away.is_set():
            away.set()
            raise gone()
        assert back.wait(PATIENCE)
        return vote(*arguments, **options)

    barrier.vote = vote_later  # type: ignore[method-assign]
    with AsyncCallsQueue(barrier=barrier) as queue:  # type: ignore[arg-type]
        queue.schedule_async_request(AsyncRequest(nothing, (), []))
        with pytest.raises(OutcomeUnknownError):
            queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        assert queue.get_num_unfinalized_calls() == 1
        back.set()
        # It is told once more, unless the decision has come meanwhile.
        while queue.get_num_unfinalized_calls():
            with suppress(OutcomeUnknownError):
                assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [0]


def test_close_gives_up_when_the_coordinator_is_away(barrier: FakeBarrier):
    done: list[int] = []
    queues: list[AsyncCallsQueue] = []
    away_until_closing(barrier, queues)
    with no_child_left():
        queue = AsyncCallsQueue(barrier=barrier)  # type: ignore[arg-type]
        queues.append(queue)
        for number in range(3):
            queue.schedule_async_request(AsyncRequest(nothing, (), [partial(done.append, number)]))
        with pytest.raises(OutcomeUnknownError):
            queue.close()
    # Nobody asked for the later ones: their barrier would be the first one's.
    assert (done, barrier.votes, queue.get_num_unfinalized_calls()) == ([], [], 0)


def test_a_refusal_is_raised_and_later_saves_go_on(queue: AsyncCallsQueue, barrier: FakeBarrier):
    barrier.raises[0] = [MusterError("refused")]
    for _ in range(2):
        queue.schedule_async_request(AsyncRequest(nothing, (), []))
    with pytest.raises(MusterError, match="refused"):
        queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [1]


def test_save_that_could_not_begin_is_also_cleaned_up(barrier: FakeBarrier):
    """Other ranks may have written."""
    cleaned: list[str] = []
    queue = AsyncCallsQueue(barrier=barrier)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        queue.schedule_async_request(
            AsyncRequest(nothing, (1, 2), [], preload_fn=lambda: 1 / 0),
            on_decided=lambda: cleaned.append("not started"),
        )
    queue.schedule_failure("no memory", on_decided=lambda: cleaned.append("given up"))
    with pytest.raises(AsyncSaveError):
        queue.close()
    assert cleaned == ["not started", "given up"]


def test_defect_of_the_ledger_is_raised_where_an_answer_is_waited_for(
    queue: AsyncCallsQueue, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            queue.schedule_async_request(AsyncRequest(nothing, (), []))
    assert queue.next_idx == 0


def test_an_exception_in_the_with_block_ends_the_writes_and_tells_why(barrier: FakeBarrier):
    done: list[int] = []
    with no_child_left(), pytest.raises(KeyError), AsyncCallsQueue(barrier=barrier) as queue:  # type: ignore[arg-type]
        queue.schedule_async_request(AsyncRequest(signal.pause, (), [lambda: done.append(1)]))
        raise KeyError("weight")
    assert barrier.votes == ["the training process failed: KeyError: 'weight'"]
    assert done == []


def test_a_child_that_somebody_else_reaped_is_judged_by_its_report_and_leaves_nothing(queue: AsyncCallsQueue):
    called: list[int] = []
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with no_file_left():
            queue.schedule_async_request(AsyncRequest(nothing, (), []), on_written=lambda: called.append(1))
            assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [0]
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert called == [1]
