"""Saves in order: decided by all, finalized by all or by none."""

import dis
import gc
import logging
import os
import signal
import sys
import threading
import weakref
from collections import namedtuple
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from lab.patience import PATIENCE, until
from muster.worker.decision import Decision, Outcome
from muster.worker.errors import AsyncSaveError, BarrierAbortedError, MusterError, OutcomeUnknownError
from muster.worker.saves import AsyncCallsQueue, AsyncRequest, ForkCaller, SaveTimings, abort_nvrx_checkpoint
from muster.worker.saves.queue import groups, queue_loop
from muster.worker.saves.queue import queue as module
from muster.worker.saves.queue.ledger import Ledger, QueueState
from muster.worker.saves.writers import callers
from muster.worker.saves.writers.callers import Write
from tests.support.saves.fake_barrier import FakeBarrier, no_child_left, no_file_left

CALL = dis.opmap["CALL"]


@pytest.fixture
def barrier() -> FakeBarrier:
    return FakeBarrier(world_size=2)


@pytest.fixture
def queue(barrier: FakeBarrier) -> Iterator[AsyncCallsQueue]:
    with no_child_left():
        made = AsyncCallsQueue(barrier=barrier, timeout=PATIENCE)  # type: ignore[arg-type]
        yield made
        barrier.open.set()
        with suppress(MusterError):
            made.close(abort=True)
        made.close()


def nothing() -> None:
    """Write nothing."""


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def gone() -> OutcomeUnknownError:
    return OutcomeUnknownError("gone", "save", 0, Outcome.UNKNOWN)


def threads_of_queues() -> set[threading.Thread]:
    """Those that run; of other tests' queues until these are collected."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("muster-saves")}


def decided(queue: AsyncCallsQueue) -> int:
    return queue._loop.view.ready


# ---------------------------------------------------------------------- in order


def test_several_in_flight_are_finalized_in_order(queue: AsyncCallsQueue, barrier: FakeBarrier):
    order: list[Any] = []
    barrier.open.clear()
    for number in range(3):
        request = AsyncRequest(nothing, (), [partial(order.append, number)])
        request.add_finalize_fn(partial(order.append, f"{number} again"))
        assert queue.schedule_async_request(request) == number
    assert queue.get_num_unfinalized_calls() == 3
    assert queue.maybe_finalize_async_calls(no_dist=True) == []
    barrier.open.set()
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [0, 1, 2]
    assert order == [0, "0 again", 1, "1 again", 2, "2 again"]
    assert queue.get_num_unfinalized_calls() == 0
    assert barrier.votes == [None] * 3


def test_looking_costs_no_round_trip(queue: AsyncCallsQueue, barrier: FakeBarrier):
    queue.schedule_async_request(AsyncRequest(nothing, (), []))
    until(lambda: decided(queue) == 1)
    assert queue.maybe_finalize_async_calls(no_dist=True) == [0]
    assert barrier.siblings["save/agreement"].gathered == []


def test_what_not_every_rank_has_heard_is_not_finalized_where_all_must_agree(
    queue: AsyncCallsQueue, barrier: FakeBarrier
):
    agreement = barrier.siblings["save/agreement"]
    for _ in range(3):
        queue.schedule_async_request(AsyncRequest(nothing, (), []))
    until(lambda: decided(queue) == 3)
    agreement.others_payloads = [b"1"]
    assert queue.maybe_finalize_async_calls() == [0]
    agreement.others_payloads = [b"0"]
    assert queue.maybe_finalize_async_calls() == []
    agreement.others_payloads = [b"2"]
    assert queue.maybe_finalize_async_calls() == [1, 2]
    assert agreement.gathered == [b"3", b"2", b"2"]


def test_where_all_must_agree_nobody_goes_on_before_all_have_finalized(
    queue: AsyncCallsQueue, barrier: FakeBarrier
):
    agreement = barrier.siblings["save/agreement"]
    met: list[int] = []
    for _ in range(2):
        queue.schedule_async_request(AsyncRequest(nothing, (), [lambda: met.append(len(agreement.votes))]))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    assert met == [0, 0]
    assert agreement.votes == [None]


def test_a_rank_that_has_finalized_all_by_itself_meets_the_others_too(
    queue: AsyncCallsQueue, barrier: FakeBarrier
):
    queue.schedule_async_request(AsyncRequest(nothing, (), []))
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [0]
    assert barrier.siblings["save/agreement"].votes == []
    assert queue.maybe_finalize_async_calls(blocking=True) == []
    assert barrier.siblings["save/agreement"].votes == [None]


def test_a_save_that_failed_keeps_nobody_from_meeting(queue: AsyncCallsQueue, barrier: FakeBarrier):
    barrier.others_fail[0] = "disk full"
    queue.schedule_async_request(AsyncRequest(nothing, (), []))
    barrier.siblings["save/agreement"].others_fail[0] = "finalizing a save: OSError"
    with pytest.raises(AsyncSaveError, match="disk full"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert barrier.siblings["save/agreement"].votes == [None]


def test_a_finalize_function_that_raises_is_told_to_all(queue: AsyncCallsQueue, barrier: FakeBarrier):
    def break_() -> None:
        raise OSError("cannot write the metadata")

    agreement = barrier.siblings["save/agreement"]
    queue.schedule_async_request(AsyncRequest(nothing, (), [break_]))
    with pytest.raises(OSError, match="cannot write"):
        queue.maybe_finalize_async_calls(blocking=True)
    (failure,) = agreement.votes
    assert failure is not None
    assert failure.startswith("finalizing a save: OSError: cannot write the metadata")
    queue.schedule_async_request(AsyncRequest(nothing, (), []))
    agreement.others_fail[1] = "finalizing a save: OSError: disk full"
    with pytest.raises(BarrierAbortedError, match=r"rank 1 .* finalizing a save: OSError: disk full"):
        queue.maybe_finalize_async_calls(blocking=True)


def test_a_request_without_a_function_is_finalized(queue: AsyncCallsQueue):
    done: list[int] = []
    queue.schedule_async_request(AsyncRequest(None, (), [lambda: done.append(1)]))
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [0]
    assert done == [1]


def test_bad_functions_are_refused_and_do_not_count(queue: AsyncCallsQueue):
    with pytest.raises(TypeError, match="async_fn = 'write'"):
        queue.schedule_async_request(AsyncRequest("write", (), []))  # type: ignore[arg-type]
    assert queue.schedule_async_request(AsyncRequest(nothing, (), [])) == 0


def test_timings_come_for_each_save_that_was_finalized(barrier: FakeBarrier):
    heard: list[SaveTimings] = []
    with AsyncCallsQueue(barrier=barrier, on_saved=heard.append) as queue:  # type: ignore[arg-type]
        queue.schedule_async_request(AsyncRequest(nothing, (), []))
    assert [one.call_idx for one in heard] == [0]
    assert heard[0].start > 0
    assert heard[0].write > 0
    assert heard[0].stall == heard[0].preload + heard[0].start + heard[0].finalize


def test_what_the_training_thread_waited_for_before_is_in_the_stall(barrier: FakeBarrier):
    heard: list[SaveTimings] = []
    with AsyncCallsQueue(barrier=barrier, on_saved=heard.append) as queue:  # type: ignore[arg-type]
        queue.schedule_async_request(AsyncRequest(nothing, (), []), prepared=7)
    assert heard[0].preload >= 7
    assert heard[0].stall >= 7


# ---------------------------------------------------------------------- failures


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
    def preload() -> None:
        raise MemoryError("no room for the copy")

    with pytest.raises(MemoryError):
        queue.schedule_async_request(AsyncRequest(nothing, (), [], preload_fn=preload))
    assert queue.schedule_async_request(AsyncRequest(nothing, (), [])) == 1
    with pytest.raises(AsyncSaveError, match="no room for the copy") as caught:
        queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
    assert caught.value.call_idx == 0
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [1]
    assert [vote is None for vote in barrier.votes] == [False, True]


def test_a_failure_of_what_follows_the_write_is_a_vote_too(queue: AsyncCallsQueue, barrier: FakeBarrier):
    def break_() -> None:
        raise ValueError("buffers are gone")

    queue.schedule_async_request(AsyncRequest(nothing, (), []), on_written=break_)
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

    def commit(_: Any) -> None:
        raise OSError("cannot rename")

    request = AsyncRequest(nothing, (), [lambda: done.append(1)])
    queue.schedule_async_request(request, commit=commit)
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


def test_who_waits_is_told_that_the_coordinator_is_away_and_may_wait_on(barrier: FakeBarrier):
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


def away_until_closing(barrier: FakeBarrier, queues: list[AsyncCallsQueue]) -> None:
    """The coordinator does not answer a vote before the queue closes, nor then."""

    def vote(*_: Any, **__: Any) -> Decision:
        until(lambda: queues[0]._loop.view.state is QueueState.CLOSING)
        raise gone()

    barrier.vote = vote  # type: ignore[method-assign]


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


# ---------------------------------------------------------------------- its end


def test_closing_finalizes_what_was_scheduled_and_raises_the_first_failure(barrier: FakeBarrier):
    done: list[int] = []
    before = threads_of_queues()
    with no_child_left():
        queue = AsyncCallsQueue(barrier=barrier)  # type: ignore[arg-type]
        for number, write in enumerate((kill_itself, nothing, kill_itself, nothing)):
            queue.schedule_async_request(AsyncRequest(write, (), [partial(done.append, number)]))
        with pytest.raises(AsyncSaveError, match="save 0"):
            queue.close()
        assert done == [1, 3]
        queue.close()
    assert threads_of_queues() <= before


def test_a_finalize_function_that_raises_does_not_keep_the_others_from_it(barrier: FakeBarrier):
    done: list[int] = []
    queue = AsyncCallsQueue(barrier=barrier)  # type: ignore[arg-type]
    queue.schedule_async_request(AsyncRequest(nothing, (), [lambda: 1 / 0]))
    queue.schedule_async_request(AsyncRequest(nothing, (), [lambda: done.append(1)]))
    with pytest.raises(ZeroDivisionError):
        queue.close()
    assert done == [1]


def test_closing_may_end_what_is_under_way(barrier: FakeBarrier):
    with no_child_left():
        queue = AsyncCallsQueue(barrier=barrier)  # type: ignore[arg-type]
        queue.schedule_async_request(AsyncRequest(signal.pause, (), []))
        with pytest.raises(AsyncSaveError, match="aborted what was under way"):
            queue.close(abort=True)


def test_cleaning_up_comes_after_the_decision_and_cannot_change_it(barrier: FakeBarrier):
    told: list[bool] = []
    with AsyncCallsQueue(barrier=barrier) as queue:  # type: ignore[arg-type]

        def clean() -> None:
            told.append(queue._loop.view.ready == 1)
            raise OSError("cannot remove")

        queue.schedule_async_request(AsyncRequest(nothing, (), []), on_decided=clean)
        until(lambda: bool(told))
    assert told == [True]


def test_what_could_not_be_begun_is_cleaned_up_after_as_well(barrier: FakeBarrier):
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


def test_two_queues_do_not_take_each_others_decisions(barrier: FakeBarrier, monkeypatch: pytest.MonkeyPatch):
    with AsyncCallsQueue(barrier=barrier):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r'another queue.*group "save"'):
            AsyncCallsQueue(barrier=FakeBarrier(world_size=2))  # type: ignore[arg-type]
        AsyncCallsQueue(barrier=FakeBarrier(world_size=2, rank=1)).close()  # type: ignore[arg-type]
        monkeypatch.setattr(groups, "job_barrier", FakeBarrier)
        monkeypatch.setenv("MUSTER_RUN_ID", "job")
        monkeypatch.setenv("MUSTER_ENDPOINT", "here:7550")
        with AsyncCallsQueue() as second, AsyncCallsQueue() as third:
            assert [second._barrier.prefix, third._barrier.prefix] == ["save-2", "save-3"]
        with AsyncCallsQueue() as again:
            assert again._barrier.prefix == "save-2"
    AsyncCallsQueue(barrier=FakeBarrier(world_size=2)).close()  # type: ignore[arg-type]


def test_nothing_is_scheduled_after_closing(barrier: FakeBarrier):
    queue = AsyncCallsQueue(barrier=barrier)  # type: ignore[arg-type]
    queue.close()
    with no_child_left(), pytest.raises(MusterError, match="closed"):
        queue.schedule_async_request(AsyncRequest(nothing, (), []))


def test_aborted_queue_stays_shut_while_the_outcome_of_a_save_is_unknown(
    barrier: FakeBarrier, caplog: pytest.LogCaptureFixture
):
    """Its next vote would hear the decision on that save, and finalize what nobody has agreed on."""
    done: list[int] = []
    queues: list[AsyncCallsQueue] = []
    away_until_closing(barrier, queues)
    with no_child_left():
        queue = AsyncCallsQueue(barrier=barrier)  # type: ignore[arg-type]
        queues.append(queue)
        queue.schedule_async_request(AsyncRequest(nothing, (), []))
        abort_nvrx_checkpoint()
        assert "gone" in caplog.text
        for _ in range(2):
            with pytest.raises(MusterError, match=r"outcome of save 0 is not known.*generation"):
                queue.schedule_async_request(AsyncRequest(nothing, (), [lambda: done.append(1)]))
        queue.close()
        with pytest.raises(MusterError, match="outcome of save 0 is not known"):
            AsyncCallsQueue(barrier=barrier)  # type: ignore[arg-type]
        barrier.generation = 1
        AsyncCallsQueue(barrier=barrier).close()  # type: ignore[arg-type]
    assert (done, barrier.votes) == ([], [])


@pytest.mark.parametrize("commits", [False, True])
def test_ranks_that_aborted_at_different_points_do_not_make_a_save_of_two(
    barrier: FakeBarrier, *, commits: bool
):
    done: list[int] = []
    commit = (lambda _: done.append(2)) if commits else None
    queue = AsyncCallsQueue(barrier=barrier)  # type: ignore[arg-type]
    queue.schedule_async_request(AsyncRequest(nothing, (), []))
    queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
    queue.close(abort=True)
    barrier.others_say[1] = b"1"
    queue.schedule_async_request(AsyncRequest(nothing, (), [lambda: done.append(1)]), commit=commit)
    with pytest.raises(AsyncSaveError, match=r"rank 0 has made 0 before this one, rank 1 1\."):
        queue.close()
    assert done == []
    assert barrier.said == [b"", b"0"]
    assert [vote is None for vote in barrier.siblings["save/commit"].votes] == [False] * commits


@pytest.mark.parametrize("other", [b"", b"1"], ids=["one that says nothing", "one that says the same"])
def test_ranks_that_aborted_at_the_same_point_go_on(barrier: FakeBarrier, other: bytes):
    """Nor does a rank of an older SDK say anything, or one that had no cause to abort."""
    with AsyncCallsQueue(barrier=barrier) as queue:  # type: ignore[arg-type]
        queue.close(abort=True)
        barrier.others_say[1] = other
        for number in range(2):
            queue.schedule_async_request(AsyncRequest(nothing, (), []))
            assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [number]
    assert barrier.said == [b"0", b"1"]


def test_an_abort_finalizes_nothing_and_names_what_was_committed(
    barrier: FakeBarrier, caplog: pytest.LogCaptureFixture
):
    def finalize() -> None:
        raise ZeroDivisionError

    with no_child_left():
        one = AsyncCallsQueue(barrier=barrier)  # type: ignore[arg-type]
        other = AsyncCallsQueue(barrier=FakeBarrier("other", world_size=2))  # type: ignore[arg-type]
        for queue in (one, other):
            queue.schedule_async_request(AsyncRequest(nothing, (), [finalize]))
            until(partial(decided, queue))
            queue.schedule_async_request(AsyncRequest(signal.pause, (), [finalize]))
        abort_nvrx_checkpoint()
        assert caplog.text.count("save 0 was committed; it is not finalized here") == 2
        assert caplog.text.count("aborted what was under way") >= 2
        assert [queue.get_num_unfinalized_calls() for queue in (one, other)] == [0, 0]
        one.close()
        other.close()


def test_a_queue_that_cannot_be_closed_does_not_keep_the_others_from_their_abort(
    barrier: FakeBarrier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse() -> None:
        raise OSError("no more files")

    with no_child_left():
        both = [
            AsyncCallsQueue(barrier=barrier),  # type: ignore[arg-type]
            AsyncCallsQueue(barrier=FakeBarrier("other", world_size=2)),  # type: ignore[arg-type]
        ]
        with monkeypatch.context() as patched:
            for queue in both:
                patched.setattr(queue._caller, "close", refuse)
            abort_nvrx_checkpoint()
        assert caplog.text.count("no more files") == 2
        for queue in both:
            queue.close()


def test_an_abort_does_not_open_what_was_closed(barrier: FakeBarrier):
    queue = AsyncCallsQueue(barrier=barrier)  # type: ignore[arg-type]
    queue.close()
    abort_nvrx_checkpoint()
    with pytest.raises(MusterError, match="closed"):
        queue.schedule_async_request(AsyncRequest(nothing, (), []))


def refuse_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        theirs(thread)

    theirs = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.parametrize("name", [queue_loop.LOOP, queue_loop.VOTER])
def test_queue_is_not_made_where_no_thread_can_be_started(
    barrier: FakeBarrier, monkeypatch: pytest.MonkeyPatch, name: str
):
    with monkeypatch.context() as patched:
        refuse_threads(name, patched)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            AsyncCallsQueue(barrier=barrier)  # type: ignore[arg-type]
    AsyncCallsQueue(barrier=barrier).close()  # type: ignore[arg-type]


def test_ended_queue_closes_without_a_thread(barrier: FakeBarrier, monkeypatch: pytest.MonkeyPatch):
    """As at the exit of Python 3.12 and newer, where none can be started any more."""
    queue = AsyncCallsQueue(barrier=barrier)  # type: ignore[arg-type]
    queue.close(abort=True)
    refuse_threads(queue_loop.LOOP, monkeypatch)
    queue.close()
    with pytest.raises(MusterError, match="closed"):
        queue.schedule_async_request(AsyncRequest(nothing, (), []))


def test_abort_fails_a_save_that_is_still_prepared_and_ends_its_late_writer(barrier: FakeBarrier):
    """By a thread that watches the job. The copy to the host may take seconds; the abort does not wait."""

    class Slow(ForkCaller):
        def start(self, request: AsyncRequest, copied: Any = None) -> Write:
            if request.call_idx == 1:
                beginning.set()
                assert aborted.wait(PATIENCE)
            return super().start(request, copied)

    def abort() -> None:
        assert beginning.wait(PATIENCE)
        until(lambda: barrier.votes)  # Else the first one fails, and this with it.
        with pytest.raises(AsyncSaveError, match=r"save 1 .* aborted what was under way"):
            queue.close(abort=True)
        aborted.set()

    beginning, aborted = threading.Event(), threading.Event()
    released = threading.Event()
    with no_child_left():
        queue = AsyncCallsQueue(barrier=barrier, caller=Slow())  # type: ignore[arg-type]
        assert queue.schedule_async_request(AsyncRequest(nothing, (), [])) == 0
        watching = threading.Thread(target=abort)
        watching.start()
        request = AsyncRequest(signal.pause, (), [])
        assert queue.schedule_async_request(request, on_written=released.set) == 1
        watching.join()
        assert queue.schedule_async_request(AsyncRequest(nothing, (), [])) == 2
        assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [2]
        assert released.wait(PATIENCE)
        queue.close()
    assert [vote is None for vote in barrier.votes] == [True, False, True]


@pytest.mark.parametrize("abort", [False, True])
def test_signal_handler_that_ends_the_queue_does_not_wait_for_the_save_it_interrupted(
    barrier: FakeBarrier, *, abort: bool
):
    class Interrupted(ForkCaller):
        def start(self, request: AsyncRequest, copied: Any = None) -> Write:
            with suppress(AsyncSaveError):
                made[0].close(abort=abort)
            raise KeyboardInterrupt

    made: list[AsyncCallsQueue] = []
    queue = AsyncCallsQueue(barrier=barrier, caller=Interrupted())  # type: ignore[arg-type]
    made.append(queue)
    with pytest.raises(KeyboardInterrupt):
        queue.schedule_async_request(AsyncRequest(nothing, (), []))
    queue.close()
    assert len(barrier.votes) == 1
    assert barrier.votes != [None]


def test_save_begins_while_its_caller_holds_locks_and_in_the_callers_grad_mode(
    queue: AsyncCallsQueue, tmp_path: Path
):
    """A signal handler may have interrupted ``logging``, whose lock every fork takes; it must not wait."""
    model = threading.RLock()

    def write() -> None:
        with model, logging._lock:  # type: ignore[attr-defined]
            (tmp_path / "grad").write_text(str(torch.is_grad_enabled()))

    with logging._lock, model, torch.no_grad():  # type: ignore[attr-defined]
        assert queue.schedule_async_request(AsyncRequest(write, (), [])) == 0
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [0]
    assert (tmp_path / "grad").read_text() == "False"


def test_save_of_a_signal_handler_fails_the_save_that_it_interrupted(barrier: FakeBarrier):
    class Nested(ForkCaller):
        def start(self, request: AsyncRequest, copied: Any = None) -> Write:
            queue = made[0]
            if request.call_idx == 0:
                assert queue.schedule_async_request(AsyncRequest(nothing, (), [])) == 1
                with pytest.raises(AsyncSaveError, match=r"save 0 .* has begun another save"):
                    queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
                assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [1]
            return super().start(request, copied)

    made: list[AsyncCallsQueue] = []
    with no_child_left(), AsyncCallsQueue(barrier=barrier, caller=Nested()) as queue:  # type: ignore[arg-type]
        made.append(queue)
        assert queue.schedule_async_request(AsyncRequest(signal.pause, (), [])) == 0
    assert [vote is None for vote in barrier.votes] == [False, True]


def test_writer_that_starts_too_late_is_reaped_where_no_thread_can_be_started(
    barrier: FakeBarrier, monkeypatch: pytest.MonkeyPatch
):
    class Late(ForkCaller):
        def start(self, request: AsyncRequest, copied: Any = None) -> Write:
            with pytest.raises(AsyncSaveError, match="its queue was closed while it was begun"):
                made[0].close()
            for name in (queue_loop.LOOP, queue_loop.VOTER):
                refuse_threads(name, monkeypatch)
            return super().start(request, copied)

    made: list[AsyncCallsQueue] = []
    released: list[int] = []
    with no_child_left():
        queue = AsyncCallsQueue(barrier=barrier, caller=Late())  # type: ignore[arg-type]
        made.append(queue)
        request = AsyncRequest(signal.pause, (), [])
        assert queue.schedule_async_request(request, on_written=lambda: released.append(1)) == 0
    assert released == [1]


def test_defect_of_the_ledger_is_raised_where_an_answer_is_waited_for(
    queue: AsyncCallsQueue, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            queue.schedule_async_request(AsyncRequest(nothing, (), []))
    assert queue.next_idx == 0


def test_looking_at_an_open_queue_waits_for_no_thread(
    queue: AsyncCallsQueue, monkeypatch: pytest.MonkeyPatch
):
    queue.schedule_async_request(AsyncRequest(nothing, (), []))
    until(lambda: decided(queue) == 1 and queue._loop.settled())
    with monkeypatch.context() as patched:
        patched.setattr(queue._loop, "post", lambda _: pytest.fail("the thread was asked"))
        queue.check_open()
        assert (queue.next_idx, queue.get_num_unfinalized_calls()) == (1, 1)
    queue._loop._marks.append(None)  # As an interrupt may leave it.
    assert (queue.next_idx, queue.get_num_unfinalized_calls()) == (1, 1)


def test_what_another_thread_takes_by_an_abort_is_not_finalized_nor_is_what_is_not_decided(
    queue: AsyncCallsQueue, barrier: FakeBarrier
):
    """While the first of two that are decided is being finalized the queue is aborted, and goes on."""

    def abort() -> None:
        watcher = threading.Thread(target=queue.close, kwargs={"abort": True})
        watcher.start()
        watcher.join()
        barrier.open.clear()
        assert queue.schedule_async_request(AsyncRequest(nothing, (), [lambda: done.append(2)])) == 2

    done: list[int] = []
    queue.schedule_async_request(AsyncRequest(nothing, (), [abort]))
    queue.schedule_async_request(AsyncRequest(nothing, (), [lambda: done.append(1)]))
    until(lambda: decided(queue) == 2)
    assert queue.maybe_finalize_async_calls(no_dist=True) == [0]
    assert done == []
    barrier.open.set()
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [2]
    assert done == [2]


def test_cleaning_up_that_ends_with_any_error_ends_no_thread(queue: AsyncCallsQueue):
    """Torch's error of a checkpoint is no Exception."""

    def clean() -> None:
        raise SystemExit

    queue.schedule_async_request(AsyncRequest(nothing, (), []), on_decided=clean)
    queue.schedule_async_request(AsyncRequest(nothing, (), []))
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [0, 1]


@pytest.mark.parametrize("where", ["on_written", "commit", "on_decided", "finalize"])
def test_what_a_save_calls_may_use_its_queue_but_not_wait_for_it(
    queue: AsyncCallsQueue, barrier: FakeBarrier, where: str
):
    """It runs on the voter's thread, except for finalize functions, and that thread would wait for itself."""

    def call_back(*_: Any) -> None:
        if queue.next_idx == 1:
            queue.check_open()
            assert queue.schedule_async_request(AsyncRequest(nothing, (), [])) == 1
            assert queue.schedule_failure("not now") == 2
            assert queue.get_num_unfinalized_calls() >= 2
            queue.maybe_finalize_async_calls(no_dist=True)
            if where != "finalize":
                for refused in (
                    queue.close,
                    partial(queue.close, abort=True),
                    partial(queue.maybe_finalize_async_calls, blocking=True, no_dist=True),
                ):
                    with pytest.raises(MusterError, match="what a save calls cannot") as error:
                        refused()
                    refusals.append(str(error.value))
            queue.abort("enough")
        called.append(where)

    refusals: list[str] = []
    called: list[str] = []
    request = AsyncRequest(nothing, (), [call_back] if where == "finalize" else [])
    calls: dict[str, Any] = {} if where == "finalize" else {where: call_back}
    queue.schedule_async_request(request, **calls)
    while queue.get_num_unfinalized_calls() or queue.next_idx < 3:
        with suppress(AsyncSaveError):
            queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
    assert called == [where]
    if where != "finalize":
        close = "what a save calls cannot close its queue, which waits for that save. Close it elsewhere."
        assert refusals[:2] == [close, close]
        assert len(refusals) == 3
    assert len(barrier.votes) == 3


@pytest.mark.parametrize("abort", [False, True])
def test_finalize_function_may_close_its_queue(barrier: FakeBarrier, *, abort: bool):
    with no_child_left():
        queue = AsyncCallsQueue(barrier=barrier)  # type: ignore[arg-type]
        queue.schedule_async_request(AsyncRequest(nothing, (), [partial(queue.close, abort=abort)]))
        assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [0]
        queue.close()


def test_second_of_two_aborts_leaves_what_was_opened_again_alone(barrier: FakeBarrier):
    class Slow(ForkCaller):
        def close(self) -> None:
            closing.append(threading.current_thread().name)
            if len(closing) == 1:
                ending.set()
                assert go_on.wait(PATIENCE)

    closing: list[str] = []
    ending, go_on = threading.Event(), threading.Event()
    queue = AsyncCallsQueue(barrier=barrier, caller=Slow())  # type: ignore[arg-type]
    watchers = [threading.Thread(target=queue.close, kwargs={"abort": True}) for _ in range(2)]
    watchers[0].start()
    assert ending.wait(PATIENCE)
    watchers[1].start()
    go_on.set()
    for watcher in watchers:
        watcher.join()
    queue.schedule_async_request(AsyncRequest(nothing, (), []))
    with pytest.raises(ValueError, match="another queue"):
        AsyncCallsQueue(barrier=barrier)  # type: ignore[arg-type]
    queue.close()
    assert len(closing) == 2


def test_a_forked_process_may_not_use_its_parents_queue(
    queue: AsyncCallsQueue, monkeypatch: pytest.MonkeyPatch
):
    """The queue's threads do not run there."""
    monkeypatch.setattr(os, "getpid", lambda: queue._owner + 1)
    with pytest.raises(MusterError, match=f"made by process {queue._owner}, from which this one was forked"):
        queue.schedule_async_request(AsyncRequest(nothing, (), []))
    monkeypatch.undo()


@pytest.mark.parametrize("failure", [False, True], ids=["save", "failure"])
def test_interrupt_at_any_instruction_keeps_the_ranks_in_step(failure: bool):
    """A save that counts here has one vote, and no child writes what is not voted on."""
    for moment in count():
        interrupted, votes = interrupt_at(moment, failure)
        assert votes in ((1, 2) if interrupted else (2,))
        if not interrupted:
            assert moment > 10
            return


def interrupt_at(moment: int, failure: bool) -> tuple[bool, int]:
    """Schedule a save, interrupted at one of the moments at which it can be, and another one.

    Signals are looked at when a function begins, and when one that is not written in Python has returned.
    Interrupted are the functions of the queue and its loop, on the calling thread.

    Returns:
        Whether it was interrupted, and how many votes there were.
    """
    files = {module.__file__, queue_loop.__file__}
    left, previous, of_python = moment, 0, False

    def look() -> None:
        nonlocal left
        left -= 1
        if left == -1:
            raise KeyboardInterrupt

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal previous, of_python
        code = frame.f_code
        # Nor what finalizers of other tests' queues do meanwhile.
        if code.co_filename not in files or code.co_name in ("__del__", "drop_group", "_return_group"):
            of_python = code.co_name != "__init__"  # Which a class has called, that is not in Python.
            return None
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            look()
        elif event == "opcode":
            returned, previous = previous == CALL and not of_python, code.co_code[frame.f_lasti]
            of_python = False
            if returned:
                look()
        return trace

    barrier = FakeBarrier(world_size=2)
    with no_child_left(), AsyncCallsQueue(barrier=barrier) as queue:  # type: ignore[arg-type]
        sys.settrace(trace)
        try:
            with suppress(KeyboardInterrupt):
                if failure:
                    queue.schedule_failure("no plan")
                else:
                    queue.schedule_async_request(AsyncRequest(nothing, (), []))
        finally:
            sys.settrace(None)
        begun = queue.next_idx
        with suppress(AsyncSaveError):
            queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        assert queue.schedule_async_request(AsyncRequest(nothing, (), [])) == begun
    assert len(barrier.votes) == begun + 1
    return left < 0, len(barrier.votes)


def test_a_queue_that_was_aborted_goes_on_with_the_next_save(barrier: FakeBarrier):
    done: list[int] = []
    with no_child_left():
        queue = AsyncCallsQueue(barrier=barrier)  # type: ignore[arg-type]
        for _ in range(2):
            queue.schedule_async_request(AsyncRequest(signal.pause, (), []))
            with pytest.raises(AsyncSaveError, match="aborted what was under way"):
                queue.close(abort=True)
            queue.schedule_async_request(AsyncRequest(nothing, (), [lambda: done.append(1)]))
            queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        assert done == [1, 1]
        queue.close()
        with pytest.raises(MusterError, match="closed"):
            queue.schedule_async_request(AsyncRequest(nothing, (), []))


def test_an_aborted_queue_gives_its_group_up_until_it_goes_on(barrier: FakeBarrier):
    queue = AsyncCallsQueue(barrier=barrier)  # type: ignore[arg-type]
    queue.close(abort=True)
    with (
        AsyncCallsQueue(barrier=FakeBarrier(world_size=2)),  # type: ignore[arg-type]
        pytest.raises(ValueError, match="another queue"),
    ):
        queue.schedule_async_request(AsyncRequest(nothing, (), []))
    queue.close()


def test_all_queues_are_aborted_under_the_name_that_is_known(
    barrier: FakeBarrier, caplog: pytest.LogCaptureFixture
):
    with no_child_left():
        one = AsyncCallsQueue(barrier=barrier)  # type: ignore[arg-type]
        other = AsyncCallsQueue(barrier=FakeBarrier("other", world_size=2))  # type: ignore[arg-type]
        assert {one, other} <= set(AsyncCallsQueue.get_instances())
        one.schedule_async_request(AsyncRequest(signal.pause, (), []))
        abort_nvrx_checkpoint()
        assert "aborted what was under way" in caplog.text
        for queue in (one, other):
            queue.schedule_async_request(AsyncRequest(nothing, (), []))
            queue.close()


def test_a_queue_that_nobody_holds_gives_its_group_back_and_its_threads_end(barrier: FakeBarrier):
    before = threads_of_queues()
    with no_child_left():
        queue = AsyncCallsQueue(barrier=barrier)  # type: ignore[arg-type]
        queue.schedule_async_request(AsyncRequest(nothing, (), []))
        queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        gone = weakref.ref(queue)
        del queue
        until(lambda: gc.collect() >= 0 and gone() is None)
        AsyncCallsQueue(barrier=FakeBarrier(world_size=2)).close()  # type: ignore[arg-type]
        until(lambda: threads_of_queues() <= before)


@pytest.mark.parametrize("aborted", [False, True])
def test_threads_of_a_queue_that_was_never_closed_end_with_it(barrier: FakeBarrier, *, aborted: bool):
    before = threads_of_queues()
    queue = AsyncCallsQueue(barrier=barrier)  # type: ignore[arg-type]
    if aborted:
        queue.close(abort=True)
    assert len(threads_of_queues() - before) == 2
    del queue
    until(lambda: threads_of_queues() <= before)


def test_a_dropped_queue_does_not_wait_for_its_worker(barrier: FakeBarrier, monkeypatch: pytest.MonkeyPatch):
    """The garbage collector may run on the training thread."""
    queue = AsyncCallsQueue(persistent=True, barrier=barrier)  # type: ignore[arg-type]
    queue.schedule_async_request(AsyncRequest(os.getpid, (), []))
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [0]
    worker = queue._caller._worker  # type: ignore[attr-defined]
    process = worker.process
    waited: list[str] = []
    monkeypatch.setattr(type(worker), "end", lambda _: waited.append("for its end"))
    monkeypatch.setattr(callers, "ENDING_TIMEOUT", PATIENCE)
    os.kill(worker.pid, signal.SIGSTOP)
    gone = weakref.ref(worker)
    del queue, worker
    until(lambda: gc.collect() >= 0 and gone() is None)
    process.join(PATIENCE)
    assert (process.exitcode, waited) == (-signal.SIGKILL, [])


def test_which_group_is_the_default_does_not_depend_on_the_garbage_collector(monkeypatch: pytest.MonkeyPatch):
    """It runs at other times on other ranks, and all must find the same."""
    monkeypatch.setattr(groups, "job_barrier", FakeBarrier)
    monkeypatch.setenv("MUSTER_RUN_ID", "job")
    monkeypatch.setenv("MUSTER_ENDPOINT", "here:7550")
    queue = AsyncCallsQueue()
    gone = weakref.ref(queue)
    del queue
    until(lambda: gc.collect() >= 0 and gone() is None)
    for _ in range(2):
        with AsyncCallsQueue() as queue:
            assert queue._barrier.prefix == "save-2"
    AsyncCallsQueue(barrier=FakeBarrier()).close()  # type: ignore[arg-type]
    monkeypatch.setenv("MUSTER_ROUND", "1")
    assert groups.default_barrier().prefix == "save"


def test_saves_that_a_dropped_queue_had_not_finalized_are_in_the_log(
    barrier: FakeBarrier, caplog: pytest.LogCaptureFixture
):
    with no_child_left():
        queue = AsyncCallsQueue(barrier=barrier)  # type: ignore[arg-type]
        queue.schedule_async_request(AsyncRequest(nothing, (), []))
        del queue
        until(lambda: gc.collect() >= 0 and "1 saves were not finalized" in caplog.text)


def test_requests_of_the_peers_are_taken(barrier: FakeBarrier):
    theirs = namedtuple(
        "theirs", ("async_fn", "async_fn_args", "finalize_fns", "async_fn_kwargs", "preload_fn")
    )
    done: list[int] = []
    with AsyncCallsQueue(barrier=barrier) as queue:  # type: ignore[arg-type]
        queue.schedule_async_request(theirs(nothing, (), [lambda: done.append(1)], None, None))  # type: ignore[arg-type]
    assert done == [1]


def test_an_exception_in_the_with_block_ends_the_writes_and_tells_why(barrier: FakeBarrier):
    done: list[int] = []
    with no_child_left(), pytest.raises(KeyError), AsyncCallsQueue(barrier=barrier) as queue:  # type: ignore[arg-type]
        queue.schedule_async_request(AsyncRequest(signal.pause, (), [lambda: done.append(1)]))
        raise KeyError("weight")
    assert barrier.votes == ["the training process failed: KeyError: 'weight'"]
    assert done == []


def test_the_with_block_finalizes_at_its_end(barrier: FakeBarrier, tmp_path: Path):
    before = threads_of_queues()
    with no_child_left(), AsyncCallsQueue(barrier=barrier) as queue:  # type: ignore[arg-type]
        queue.schedule_async_request(AsyncRequest((tmp_path / "written").touch, (), []))
    assert (tmp_path / "written").exists()
    assert threads_of_queues() <= before


# ---------------------------------------------------------------------- in step, and nothing kept


def test_an_interrupt_before_the_write_counts(queue: AsyncCallsQueue):
    def preload() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        queue.schedule_async_request(AsyncRequest(nothing, (1, 2), [], preload_fn=preload))
    assert queue.schedule_async_request(AsyncRequest(nothing, (), [])) == 1


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


def test_what_finalize_functions_hold_is_let_go(queue: AsyncCallsQueue):
    class State:
        pass

    state = State()
    held = weakref.ref(state)
    queue.schedule_async_request(AsyncRequest(nothing, (), [partial(id, state)]))
    del state
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [0]
    until(lambda: held() is None)
