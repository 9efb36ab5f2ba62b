"""An abort fails the saves under way and finalizes nothing; the queue goes on with later saves."""

import signal
import threading
from functools import partial
from typing import Any

import pytest

from lab.patience import PATIENCE, until
from muster.worker.errors import AsyncSaveError, MusterError
from muster.worker.saves import AsyncCallsQueue, AsyncRequest, ForkCaller, abort_nvrx_checkpoint
from muster.worker.saves.writers.callers import Write
from tests.support.expect import raising
from tests.support.saves.child_processes import no_child_left
from tests.support.saves.fake_barrier import FakeBarrier
from tests.unit.worker.saves.queue.queue_probes import away_until_closing, decided, nothing


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
    with no_child_left():
        both = [
            AsyncCallsQueue(barrier=barrier),  # type: ignore[arg-type]
            AsyncCallsQueue(barrier=FakeBarrier("other", world_size=2)),  # type: ignore[arg-type]
        ]
        with monkeypatch.context() as patched:
            for queue in both:
                patched.setattr(queue._caller, "close", raising(OSError, "no more files"))
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


def test_abort_fails_a_save_that_is_still_prepared_and_ends_its_late_writer(barrier: FakeBarrier):
    """By a thread that watches the job. The copy to the host may take seconds; the abort does not wait."""

    class Slow(ForkCaller):
        def start(self, request: AsyncRequest, wait_for_copies: Any = None) -> Write:
            if request.call_idx == 1:
                beginning.set()
                assert aborted.wait(PATIENCE)
            return super().start(request, wait_for_copies)

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


def test_saves_aborted_by_another_thread_and_undecided_saves_are_not_finalized(
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
