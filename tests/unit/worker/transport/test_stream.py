"""A stream that one thread opens again whenever it breaks, over calls that the test makes."""

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from lab.patience import PATIENCE, until
from muster.client import replicas
from muster.worker.transport import stream
from muster.worker.transport.stream import ReconnectingStream, StreamSignal
from tests.support.world.node_wire import BROKEN


class Channel:
    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, *_: object) -> None: ...


class Call:
    """Yields some messages, and then an error, or waits to be cancelled."""

    def __init__(self, *messages: Any) -> None:
        self.messages = messages
        self.cancelled = threading.Event()

    def __iter__(self) -> Iterator[Any]:
        for message in self.messages:
            if isinstance(message, grpc.RpcError):
                raise message
            yield message
        assert self.cancelled.wait(PATIENCE)
        raise BROKEN

    def cancel(self) -> None:
        self.cancelled.set()


class User:
    """Opens prepared calls; a message is what it means for the stream, or "admit"."""

    def __init__(self, *calls: Call) -> None:
        self.calls = list(calls)
        self.opened: list[Call] = []
        self.ends: list[grpc.RpcError | None] = []
        self.done = False
        self.changed = threading.Condition()
        self.has_finished = threading.Event()
        self.stream = ReconnectingStream(self, "there:1", "a test", self.changed)

    def start(self) -> "User":
        with self.changed:
            self.stream.start("a-test")
        return self

    def open(self, channel: object, metadata: object) -> Call:
        call = self.calls.pop(0)
        self.opened.append(call)
        self.done = self.done or not self.calls
        return call

    def handle(self, response: Any) -> StreamSignal:
        if isinstance(response, StreamSignal):
            return response
        with self.changed:
            self.stream.admit()
        return StreamSignal.ANSWERED

    def call_ended(self, error: grpc.RpcError | None) -> None:
        self.ends.append(error)

    def lost(self) -> None: ...

    def finished(self) -> None:
        self.has_finished.set()


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "open_channel", lambda target: Channel())
    monkeypatch.setattr(replicas, "FIRST_BACKOFF", 0.001)
    monkeypatch.setattr(replicas, "_all", {})


def test_broken_stream_is_opened_again_and_the_loss_logged(caplog: pytest.LogCaptureFixture):
    user = User(Call("admit", BROKEN), Call("admit"), Call()).start()
    until(lambda: len(user.opened) == 2 and user.stream.connected)
    assert user.ends == [BROKEN]
    assert "lost the coordinator at there:1 (UNAVAILABLE: connection reset); connecting again" in caplog.text
    with user.changed:
        user.done = True
        user.stream.interrupt()
    assert user.has_finished.wait(PATIENCE)


def test_stream_logs_no_reconnection_if_its_user_is_over(caplog: pytest.LogCaptureFixture):
    class Refused(User):
        def call_ended(self, error: grpc.RpcError | None) -> None:
            super().call_ended(error)
            self.done = True

    user = Refused(Call("admit", BROKEN), Call()).start()
    assert user.has_finished.wait(PATIENCE)
    assert (user.ends, user.stream.connected) == ([BROKEN], False)
    assert caplog.messages == []


def test_ended_call_is_not_kept_alive_by_itself():
    """It is its own error, as those of gRPC are, and must not be left to the end of the interpreter."""

    class Ended(Call, grpc.RpcError):
        def __iter__(self) -> Iterator[Any]:
            raise self

        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.UNAVAILABLE

        def details(self) -> str:
            return "it has ended"

        def trailing_metadata(self) -> tuple[()]:
            return ()

    user = User(Ended(), Call())
    ended = weakref.ref(user.calls[0])
    gc.collect()
    gc.disable()
    try:
        user.start()
        assert user.has_finished.wait(PATIENCE)
        user.opened.clear()
        assert len(user.ends) == 1
        user.ends.clear()
        assert ended() is None
    finally:
        gc.enable()


def test_interrupted_stream_is_replaced_without_an_error():
    user = User(Call("admit"), Call("admit"), Call()).start()
    until(lambda: user.stream.connected)
    with user.changed:
        user.stream.start("again")
        assert not user.stream.connected
    until(lambda: len(user.opened) == 2 and user.stream.connected)
    assert user.opened[0].cancelled.is_set()
    assert user.ends == []
    with user.changed:
        user.done = True
        user.stream.interrupt()
    assert user.has_finished.wait(PATIENCE)


def test_replaced_and_draining_streams_are_followed_by_another():
    user = User(Call(StreamSignal.REPLACE), Call(StreamSignal.DRAINING), Call(BROKEN), Call()).start()
    assert user.has_finished.wait(PATIENCE)
    assert user.ends == [BROKEN]


def test_last_attempt_fails_only_once():
    user = User(Call(BROKEN), Call(), Call())
    with user.changed:
        user.stream.finish()
    user.start()
    assert user.has_finished.wait(PATIENCE)
    assert len(user.opened) == 1


def test_contact_is_measured_only_while_it_is_lost():
    user = User()
    left = user.stream.seconds_left(5.0)
    assert left is not None
    assert 0.0 < left <= 5.0
    user.stream.admit()
    assert user.stream.seconds_left(5.0) is None


def test_keepalive_that_the_coordinator_asks_for_never_gets_slower():
    user = User()
    assert user.stream.learn(["a:1"], 900) is StreamSignal.REPLACE
    assert user.stream.learn(["a:1"], 0, session_ttl_ms=6_000) is StreamSignal.ANSWERED
    assert user.stream.learn(["a:1"], 0, session_ttl_ms=600) is StreamSignal.REPLACE
