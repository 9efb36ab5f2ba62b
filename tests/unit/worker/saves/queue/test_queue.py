"""Saves in order: decided by all ranks, and finalized by all or by none."""

import weakref
from collections import namedtuple
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lab.patience import until
from muster.worker.errors import AsyncSaveError, BarrierAbortedError, MusterError
from muster.worker.saves import AsyncCallsQueue, AsyncRequest, SaveTimings
from tests.support.expect import raising
from tests.support.saves.child_processes import no_child_left
from tests.support.saves.fake_barrier import FakeBarrier
from tests.unit.worker.saves.queue.queue_probes import decided, nothing, threads_of_queues


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


def test_save_is_finalized_only_after_every_rank_knows_the_decision(
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
    agreement = barrier.siblings["save/agreement"]
    queue.schedule_async_request(AsyncRequest(nothing, (), [raising(OSError, "cannot write the metadata")]))
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


def test_stall_includes_the_earlier_wait_of_the_training_thread(barrier: FakeBarrier):
    heard: list[SaveTimings] = []
    with AsyncCallsQueue(barrier=barrier, on_saved=heard.append) as queue:  # type: ignore[arg-type]
        queue.schedule_async_request(AsyncRequest(nothing, (), []), prepared=7)
    assert heard[0].preload >= 7
    assert heard[0].stall >= 7


def test_cleaning_up_comes_after_the_decision_and_cannot_change_it(barrier: FakeBarrier):
    decided: list[bool] = []
    with AsyncCallsQueue(barrier=barrier) as queue:  # type: ignore[arg-type]

        def clean() -> None:
            decided.append(queue._loop.view.ready == 1)
            raise OSError("cannot remove")

        queue.schedule_async_request(AsyncRequest(nothing, (), []), on_decided=clean)
        until(lambda: bool(decided))
    assert decided == [True]


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


def test_cleaning_up_that_ends_with_any_error_ends_no_thread(queue: AsyncCallsQueue):
    """Torch's error of a checkpoint is no Exception."""
    queue.schedule_async_request(AsyncRequest(nothing, (), []), on_decided=raising(SystemExit))
    queue.schedule_async_request(AsyncRequest(nothing, (), []))
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [0, 1]


@pytest.mark.parametrize("where", ["on_written", "commit", "on_decided", "finalize"])
def test_callback_of_a_save_may_use_its_queue_but_not_wait_for_the_queue(
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


def test_requests_of_the_peers_are_taken(barrier: FakeBarrier):
    theirs = namedtuple(
        "theirs", ("async_fn", "async_fn_args", "finalize_fns", "async_fn_kwargs", "preload_fn")
    )
    done: list[int] = []
    with AsyncCallsQueue(barrier=barrier) as queue:  # type: ignore[arg-type]
        queue.schedule_async_request(theirs(nothing, (), [lambda: done.append(1)], None, None))  # type: ignore[arg-type]
    assert done == [1]


def test_the_with_block_finalizes_at_its_end(barrier: FakeBarrier, tmp_path: Path):
    before = threads_of_queues()
    with no_child_left(), AsyncCallsQueue(barrier=barrier) as queue:  # type: ignore[arg-type]
        queue.schedule_async_request(AsyncRequest((tmp_path / "written").touch, (), []))
    assert (tmp_path / "written").exists()
    assert threads_of_queues() <= before


def test_objects_held_by_finalize_functions_are_released(queue: AsyncCallsQueue):
    class State:
        pass

    state = State()
    held = weakref.ref(state)
    queue.schedule_async_request(AsyncRequest(nothing, (), [partial(id, state)]))
    del state
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [0]
    until(lambda: held() is None)
