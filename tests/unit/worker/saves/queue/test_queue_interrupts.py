"""Interrupts and signal handlers, at any moment of the start of a save."""

import dis
import logging
import signal
import sys
import threading
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from muster.worker.errors import AsyncSaveError
from muster.worker.saves import AsyncCallsQueue, AsyncRequest, ForkCaller
from muster.worker.saves.queue import queue as module
from muster.worker.saves.queue import queue_loop
from muster.worker.saves.writers.callers import Write
from tests.support.expect import raising
from tests.support.saves.child_processes import no_child_left
from tests.support.saves.fake_barrier import FakeBarrier
from tests.unit.worker.saves.queue.queue_probes import nothing, refuse_threads

CALL = dis.opmap["CALL"]


@pytest.mark.parametrize("abort", [False, True])
def test_signal_handler_that_ends_the_queue_does_not_wait_for_the_save_it_interrupted(
    barrier: FakeBarrier, *, abort: bool
):
    class Interrupted(ForkCaller):
        def start(self, request: AsyncRequest, wait_for_copies: Any = None) -> Write:
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
        def start(self, request: AsyncRequest, wait_for_copies: Any = None) -> Write:
            queue = made[0]
            if request.call_idx == 0:
                assert queue.schedule_async_request(AsyncRequest(nothing, (), [])) == 1
                with pytest.raises(AsyncSaveError, match=r"save 0 .* has begun another save"):
                    queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
                assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [1]
            return super().start(request, wait_for_copies)

    made: list[AsyncCallsQueue] = []
    with no_child_left(), AsyncCallsQueue(barrier=barrier, caller=Nested()) as queue:  # type: ignore[arg-type]
        made.append(queue)
        assert queue.schedule_async_request(AsyncRequest(signal.pause, (), [])) == 0
    assert [vote is None for vote in barrier.votes] == [False, True]


def test_writer_that_starts_too_late_is_reaped_where_no_thread_can_be_started(
    barrier: FakeBarrier, monkeypatch: pytest.MonkeyPatch
):
    class Late(ForkCaller):
        def start(self, request: AsyncRequest, wait_for_copies: Any = None) -> Write:
            with pytest.raises(AsyncSaveError, match="its queue was closed while it was begun"):
                made[0].close()
            for name in (queue_loop.LOOP, queue_loop.VOTER):
                refuse_threads(name, monkeypatch)
            return super().start(request, wait_for_copies)

    made: list[AsyncCallsQueue] = []
    released: list[int] = []
    with no_child_left():
        queue = AsyncCallsQueue(barrier=barrier, caller=Late())  # type: ignore[arg-type]
        made.append(queue)
        request = AsyncRequest(signal.pause, (), [])
        assert queue.schedule_async_request(request, on_written=lambda: released.append(1)) == 0
    assert released == [1]


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


def test_an_interrupt_before_the_write_counts(queue: AsyncCallsQueue):
    with pytest.raises(KeyboardInterrupt):
        queue.schedule_async_request(AsyncRequest(nothing, (1, 2), [], preload_fn=raising(KeyboardInterrupt)))
    assert queue.schedule_async_request(AsyncRequest(nothing, (), [])) == 1
