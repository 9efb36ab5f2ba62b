"""A queue that is closed or dropped gives back its group, its threads and its worker."""

import gc
import os
import signal
import weakref
from functools import partial

import pytest

from lab.patience import PATIENCE, until
from muster.worker.errors import AsyncSaveError, MusterError
from muster.worker.saves import AsyncCallsQueue, AsyncRequest
from muster.worker.saves.queue import groups, queue_loop
from muster.worker.saves.writers import callers
from tests.support.saves.child_processes import no_child_left
from tests.support.saves.fake_barrier import FakeBarrier
from tests.unit.worker.saves.queue.queue_probes import kill_itself, nothing, refuse_threads, threads_of_queues


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


@pytest.mark.parametrize("abort", [False, True])
def test_finalize_function_may_close_its_queue(barrier: FakeBarrier, *, abort: bool):
    with no_child_left():
        queue = AsyncCallsQueue(barrier=barrier)  # type: ignore[arg-type]
        queue.schedule_async_request(AsyncRequest(nothing, (), [partial(queue.close, abort=abort)]))
        assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [0]
        queue.close()


def test_a_forked_process_may_not_use_its_parents_queue(
    queue: AsyncCallsQueue, monkeypatch: pytest.MonkeyPatch
):
    """The queue's threads do not run there."""
    monkeypatch.setattr(os, "getpid", lambda: queue._owner + 1)
    with pytest.raises(MusterError, match=f"made by process {queue._owner}, from which this one was forked"):
        queue.schedule_async_request(AsyncRequest(nothing, (), []))
    monkeypatch.undo()


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
