"""The exit waits for gRPC's threads, here threads of the test."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lab.patience import PATIENCE
from muster.worker.transport import call_threads
from muster.worker.transport.call_threads import CallThreads


@pytest.fixture(autouse=True)
def _no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_threads, "_open", set())
    monkeypatch.setattr(call_threads, "_threads", set())
    monkeypatch.setattr(call_threads, "_exiting", False)


class Call:
    """A stream that two threads serve until it is ended, and then as long as the test lets them."""

    def __init__(self, *, ended: bool = False) -> None:
        self.ended = threading.Event()
        self.may_go = threading.Event()
        self.callbacks: list[Callable[[], None]] = []
        self.threads = CallThreads(iter(["a", "b"]))
        self.sent: list[str] = []
        self.serving: list[threading.Thread] = []
        self.over = ended

    def start(self) -> "Call":
        call: Any = self
        self.threads.follow(call, self.ended.set)
        self.serving = [threading.Thread(target=run) for run in (self._send, self._receive)]
        for thread in self.serving:
            thread.start()
        return self

    def add_callback(self, callback: Callable[[], None]) -> bool:
        if self.over:
            return False
        self.callbacks.append(callback)
        return True

    def _send(self) -> None:
        self.sent += self.threads.requests()
        assert self.may_go.wait(PATIENCE)

    def _receive(self) -> None:
        assert self.ended.wait(PATIENCE)
        for callback in self.callbacks:
            callback()
        assert self.may_go.wait(PATIENCE)

    def go(self) -> None:
        """Let the threads end."""
        self.ended.set()
        self.may_go.set()
        for thread in self.serving:
            thread.join(PATIENCE)


@pytest.fixture
def calls() -> Iterator[list[Call]]:
    """Two open streams."""
    calls = [Call().start(), Call().start()]
    yield calls
    for call in calls:
        call.go()


def test_exit_ends_all_streams_and_waits_for_their_threads(
    calls: list[Call], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(call_threads, "PATIENCE", PATIENCE)
    exits = threading.Thread(target=call_threads._end_streams)
    exits.start()
    assert all(call.ended.wait(PATIENCE) for call in calls), "one waits before another is ended"
    calls[0].may_go.set()
    for thread in calls[0].serving:
        thread.join(PATIENCE)
    assert exits.is_alive()
    assert call_threads.is_exiting()
    calls[1].may_go.set()
    exits.join(PATIENCE)
    assert not exits.is_alive()
    assert not any(thread.is_alive() for call in calls for thread in call.serving)
    assert calls[0].sent == ["a", "b"]


def test_exit_waits_until_an_open_stream_has_ended():
    """Only then is the thread known that receives."""

    class Awaited(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            self.set()
            return True

    call: Any = Call()
    call.threads.ended = Awaited()
    call.threads.follow(call, call.ended.set)
    call_threads._end_streams()
    assert call.threads.ended.is_set()


def test_exit_does_not_wait_for_ever(calls: list[Call], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(call_threads, "PATIENCE", 0.0)
    began = time.monotonic()
    call_threads._end_streams()
    assert time.monotonic() - began < PATIENCE / 2
    assert all(thread.is_alive() for call in calls for thread in call.serving)


def test_ended_streams_leave_nothing_although_their_channel_goes_on():
    """A store replaces its stream every few seconds, and one thread receives for all of them."""
    for _ in range(20):
        call: Any = Call()
        call.threads.follow(call, call.ended.set)
        for callback in call.callbacks:
            callback()
    assert not call_threads._open
    assert call_threads._threads == {threading.current_thread()}


def test_threads_that_have_ended_are_forgotten_at_the_next_stream(calls: list[Call]):
    calls[0].go()
    last = Call().start()
    assert not call_threads._threads & set(calls[0].serving)
    assert call_threads._open == {calls[1].threads, last.threads}
    last.go()


def test_stream_that_has_ended_already_is_not_followed():
    call = Call(ended=True).start()
    assert not call_threads._open
    call.go()
