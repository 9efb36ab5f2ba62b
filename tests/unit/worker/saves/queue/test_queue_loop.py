"""The loop of a queue takes events in, one after the other, and answers each caller."""

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from lab.patience import PATIENCE
from muster.worker.errors import MusterError
from muster.worker.saves.queue.calls import Call
from muster.worker.saves.queue.effects import DecidedSave, QueueEnded, View
from muster.worker.saves.queue.events import (
    Abandoned,
    Abort,
    CheckOpen,
    Close,
    Event,
    GetView,
    Reserve,
    Take,
    Wait,
    WriteStarted,
)
from muster.worker.saves.queue.ledger import Ledger
from muster.worker.saves.queue.queue_loop import LOOP, VOTER, QueueLoop
from muster.worker.saves.queue.states import QueueState
from muster.worker.saves.queue.voter import Voter
from muster.worker.saves.request import AsyncRequest
from muster.worker.saves.writers.callers import Ending
from tests.support.saves.fake_barrier import FakeBarrier
from tests.unit.worker.saves.queue.queue_probes import gone, refuse_threads

THREAD = 1
"""The number of the calling thread, for the ledger."""


class Group:
    """Records what the loop does with a group."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.refusal: Exception | None = None

    def take(self) -> None:
        self.done.append("taken")
        if self.refusal is not None:
            raise self.refusal

    def give_back(self) -> None:
        self.done.append("given back")

    def drop(self) -> None:
        self.done.append("dropped")

    def retire(self, save: str) -> None:
        self.done.append(f"retired by {save}")


class Caller:
    """Starts no writes."""

    def __init__(self) -> None:
        self.closed = 0
        self.error: Exception | None = None

    def close(self) -> None:
        self.closed += 1
        if self.error is not None:
            raise self.error


class NoTraces:
    def decided(self, call: Call) -> None:
        """Export nothing."""


class Write:
    """A write that goes on until it is ended."""

    pid = 7
    preload_seconds = start_seconds = 0.0

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self._ended = threading.Event()

    def wait(self, timeout: float) -> Ending:
        assert self._ended.wait(PATIENCE)
        return Ending("it was ended", 0.0)

    def abort(self, reason: str) -> None:
        self.reasons.append(reason)
        self._ended.set()
        raise OSError("no such process")


class Loop:
    """A loop, and what it works with."""

    def __init__(self) -> None:
        self.group, self.caller, self.barrier = Group(), Caller(), FakeBarrier(world_size=2)
        voter = Voter(self.barrier, FakeBarrier(), PATIENCE, NoTraces())  # type: ignore[arg-type]
        self.loop = QueueLoop(self.group, self.caller, voter)  # type: ignore[arg-type]

    def ask(self, event: Callable[..., Event], *arguments: Any) -> Any:
        """Hand a question in, and return the answer."""
        asker: SimpleQueue[Any] = SimpleQueue()
        self.loop.post(event(*arguments, asker))
        return asker.get(timeout=PATIENCE)

    def reserve(self) -> Call:
        call = Call(self, AsyncRequest(None, (), []), "")
        assert self.ask(Reserve, call, THREAD) == call.idx
        return call

    def end(self) -> None:
        """Close the queue, and wait until its threads have ended."""
        over = self.ask(Close, THREAD)
        assert isinstance(over, QueueEnded)
        if over.thread is not None:
            over.thread.join(PATIENCE)
            assert not over.thread.is_alive()


@pytest.fixture
def made() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.barrier.open.set()
    loop.end()


def test_save_is_numbered_voted_and_handed_out(made: Loop):
    first = made.reserve()
    made.loop.post(WriteStarted(first))
    second = made.reserve()
    made.loop.post(Abandoned(second, "its caller was interrupted"))
    assert [(call.idx, call.name) for call in (first, second)] == [(0, "save 0"), (1, "save 1")]
    assert made.ask(Wait, THREAD) == 2
    assert made.ask(Take) == DecidedSave(first, None)
    abandoned = made.ask(Take)
    assert abandoned.save is second
    assert "its caller was interrupted" in str(abandoned.error)
    assert made.ask(Take) is None
    assert made.loop.view == View(QueueState.OPEN, next_idx=2, ready=0, unfinalized=0)


def test_answer_comes_when_the_view_shows_the_event(made: Loop):
    for number in range(20):
        made.reserve()
        assert made.loop.settled()
        assert made.loop.view.next_idx == number + 1


def test_event_that_was_put_while_the_queue_was_closed_is_taken_in_with_the_next(made: Loop):
    made.loop.put(Abandoned(object(), "never begun"))
    made.loop.putter(Abandoned(object(), "never begun"))()
    assert made.loop.settled(), "nobody waits for these"
    assert made.ask(GetView) == View(QueueState.INACTIVE, 0, 0, 0)


def test_group_is_taken_once_and_given_back_when_the_queue_is_closed(made: Loop):
    for _ in range(2):
        assert made.ask(CheckOpen) is None
    assert made.group.done == ["taken"]
    made.end()
    assert (made.group.done, made.caller.closed) == (["taken", "given back"], 1)
    made.loop.drop_group()
    assert made.group.done == ["taken", "given back"], "another queue may have it by now"
    assert isinstance(made.ask(CheckOpen), MusterError)


def test_group_of_a_queue_that_nobody_holds_is_free_at_once(made: Loop):
    made.ask(CheckOpen)
    made.loop.drop_group()
    assert made.group.done == ["taken", "dropped"]
    made.end()
    assert made.group.done == ["taken", "dropped"]


def test_group_that_is_refused_is_the_callers_error_and_the_queue_may_try_again(made: Loop):
    made.group.refusal = ValueError("another queue has it")
    assert made.ask(CheckOpen) is made.group.refusal
    assert made.ask(GetView).state is QueueState.INACTIVE
    made.group.refusal = None
    assert made.ask(CheckOpen) is None
    assert made.ask(GetView).state is QueueState.OPEN


@pytest.mark.parametrize("name", [LOOP, VOTER])
def test_queue_does_not_open_without_a_thread_and_answers_all_the_same(
    made: Loop, monkeypatch: pytest.MonkeyPatch, name: str
):
    with monkeypatch.context() as patched:
        refuse_threads(name, patched)
        refusal = made.ask(CheckOpen)
        assert isinstance(refusal, RuntimeError)
        assert "can't start new thread" in str(refusal)
        assert made.ask(GetView) == View(QueueState.INACTIVE, 0, 0, 0)
    assert "given back" in made.group.done or "taken" not in made.group.done
    assert made.reserve().idx == 0


def test_defect_of_the_ledger_is_answered_and_the_next_event_is_taken_in(
    made: Loop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    theirs = Ledger.step

    def step(ledger: Ledger, event: Event) -> Any:
        if isinstance(event, CheckOpen):
            raise AssertionError("a defect")
        return theirs(ledger, event)

    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "step", step)
        assert isinstance(made.ask(CheckOpen), AssertionError)
        made.loop.post(WriteStarted(object()))
        assert made.ask(GetView).state is QueueState.INACTIVE
    assert "the state of a queue of saves is broken" in caplog.text


def test_abort_ends_writes_and_drops_saves_though_a_writer_cannot_be_ended(
    made: Loop, caplog: pytest.LogCaptureFixture
):
    call = made.reserve()
    write = call.write = Write()
    made.loop.post(WriteStarted(call))
    over = made.ask(Abort, "the user aborts")
    assert [one.save for one in over.dropped] == [call]
    assert isinstance(over.dropped[0].error, MusterError)
    assert write.reasons == ["the user aborts"]
    assert "save 0: its write cannot be ended" in caplog.text
    assert made.reserve().idx == 1, "it opens again"


def test_writers_that_cannot_be_released_are_the_error_of_the_close(made: Loop):
    made.ask(CheckOpen)
    made.caller.error = OSError("no such process")
    over = made.ask(Close, THREAD)
    assert over.error is made.caller.error
    assert made.group.done == ["taken", "given back"]


def test_save_without_an_outcome_at_the_close_retires_the_group(made: Loop):
    call = made.reserve()
    made.barrier.raises[0] = [gone()]
    made.barrier.open.clear()
    made.loop.post(WriteStarted(call))
    asker: SimpleQueue[Any] = SimpleQueue()
    made.loop.post(Close(THREAD, asker))
    made.barrier.open.set()
    asker.get(timeout=PATIENCE)
    assert made.group.done == ["taken", "retired by save 0", "given back"]


def test_threads_of_the_queue_know_themselves_and_end_with_it(made: Loop, monkeypatch: pytest.MonkeyPatch):
    seen: set[tuple[threading.Thread, bool]] = set()

    def look() -> None:
        seen.add((threading.current_thread(), made.loop.runs_here()))

    def step(ledger: Ledger, event: Event) -> Any:
        look()
        return theirs(ledger, event)

    theirs = Ledger.step
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "step", step)
        call = made.reserve()
        call.on_written = look
        made.loop.post(WriteStarted(call))
        made.ask(Wait, THREAD)
    assert {(thread.name, runs_here) for thread, runs_here in seen} == {(LOOP, True), (VOTER, True)}
    assert not made.loop.runs_here()
    made.end()
    assert not any(thread.is_alive() for thread, _ in seen)
