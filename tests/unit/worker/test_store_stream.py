"""The stream of a store: what travels on it, what does not, and what comes after it has ended."""

import gc
import inspect
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from lab.patience import PATIENCE
from muster.client.replicas import Target
from muster.v1 import store_pb2 as pb
from muster.worker import store_stream
from muster.worker.store_stream import CALLS, CALLS_FOR, MAX_BYTES, NAMES, SOON, SPARE, StoreConnection
from muster.worker.transport import call_threads
from muster.worker.transport.channel import SharedChannel

CHECK = pb.CheckRequest(run_id="job", keys=["k"])
YES, NO = pb.CheckResponse(present=True), pb.CheckResponse(present=False)
ON_STREAM = pb.OperateResponse(check=YES)
"""What a stream of these tests answers; a call answers ``NO``."""


class Ended(grpc.RpcError):
    """A call that ended so."""

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__()
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "it has ended"

    def trailing_metadata(self) -> Any:
        return (("key", "value"),)


class Stream:
    """One that answers as it is told, and then ends."""

    def __init__(self, said: Iterator[pb.OperateRequest], answers: list[Any]) -> None:
        self.said = said
        self.answers = answers
        self.cancelled = False
        self.active = True
        self.callbacks: list[Callable[[], None]] = []

    def is_active(self) -> bool:
        return self.active

    def __next__(self) -> pb.OperateResponse:
        assert next(self.said).WhichOneof("operation") in ("check", "wait")
        answer = self.answers.pop(0) if self.answers else StopIteration()
        if inspect.isfunction(answer):
            answer = answer()
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, pb.OperateResponse)
        return answer

    def cancel(self) -> None:
        self.cancelled = True
        while self.callbacks:
            self.callbacks.pop()()

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self.callbacks.append(callback)
        return True


class Stub:
    """Opens the streams that the test has prepared."""

    def __init__(self) -> None:
        self.prepared: list[list[Any]] = []
        self.opened: list[tuple[Stream, float | None]] = []
        self.calls: list[float | None] = []

    def Operate(self, said: Any, timeout: float | None, metadata: Any) -> Stream:  # noqa: N802
        stream = Stream(said, self.prepared.pop(0))
        self.opened.append((stream, timeout))
        return stream

    def Check(self, request: Any, timeout: float | None, metadata: Any) -> pb.CheckResponse:  # noqa: N802
        self.calls.append(timeout)
        return NO


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub()
    monkeypatch.setattr(store_stream, "StoreServiceStub", lambda _: stub)
    return stub


@pytest.fixture
def line(stub: Stub) -> StoreConnection:
    channel: Any = None
    return StoreConnection(Target("host:1"), SharedChannel(channel, ()))


def ask(line: StoreConnection, timeout: float | None = 5.0) -> bool:
    answer = line.ask(CHECK, timeout, ())
    assert isinstance(answer, pb.CheckResponse)
    return answer.present


def test_each_request_has_a_stream_field_and_a_call():
    assert set(CALLS) == {*NAMES, "muster.v1.OperateRequest"}
    assert NAMES["muster.v1.StoreServiceGetRequest"] == "get"
    assert CALLS["muster.v1.StoreServiceGetRequest"] == "Get"


def test_operations_share_one_stream(line: StoreConnection, stub: Stub):
    stub.prepared = [[ON_STREAM] * 3]
    assert all(ask(line) for _ in range(3))
    assert [timeout for _, timeout in stub.opened] == [5.0 + 5.0]


def test_stream_without_a_timeout_has_no_deadline(line: StoreConnection, stub: Stub):
    stub.prepared = [[ON_STREAM] * 2, [ON_STREAM]]
    assert ask(line, None)
    assert ask(line, None)
    assert ask(line, 5.0), "which needs one"
    assert [timeout for _, timeout in stub.opened] == [None, 5.0 + 5.0]


def test_stream_with_too_little_time_left_is_not_used(
    line: StoreConnection, stub: Stub, monkeypatch: pytest.MonkeyPatch
):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stub.prepared = [[ON_STREAM] * 9, [ON_STREAM]]
    assert ask(line)
    now += 5.0
    assert ask(line)
    assert len(stub.opened) == 1
    now += 0.1
    assert ask(line)
    assert len(stub.opened) == 2
    assert stub.opened[0][0].cancelled


@pytest.mark.parametrize("end", [StopIteration(), Ended(grpc.StatusCode.UNAVAILABLE)])
def test_stream_that_ended_while_idle_is_replaced(line: StoreConnection, stub: Stub, end: Exception):
    stub.prepared = [[ON_STREAM, end], [ON_STREAM]]
    assert ask(line)
    assert ask(line)
    assert (len(stub.opened), stub.calls) == (2, [])


def test_lost_wait_is_left_to_its_caller_to_repeat(line: StoreConnection, stub: Stub):
    stub.prepared = [[ON_STREAM, Ended(grpc.StatusCode.UNAVAILABLE)]]
    assert ask(line)
    with pytest.raises(grpc.RpcError):
        line.ask(pb.WaitRequest(run_id="job", keys=["k"], timeout_ms=5000), 5.0, ())


def test_operation_becomes_a_call_if_a_new_stream_ends_silently(line: StoreConnection, stub: Stub):
    stub.prepared = [[], []]
    assert not ask(line)


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
    ],
)
def test_error_of_a_new_stream_is_the_operations_error(
    line: StoreConnection, stub: Stub, code: grpc.StatusCode
):
    stub.prepared = [[Ended(code)], [ON_STREAM]]
    with pytest.raises(grpc.RpcError):
        ask(line)
    assert stub.calls == []
    assert ask(line)


def test_refused_operation_is_not_repeated(line: StoreConnection, stub: Stub):
    stub.prepared = [[ON_STREAM, Ended(grpc.StatusCode.INVALID_ARGUMENT)], [ON_STREAM]]
    assert ask(line)
    with pytest.raises(grpc.RpcError):
        ask(line)
    assert ask(line)
    assert len(stub.opened) == 2


def test_coordinator_without_streams_is_asked_for_one_only_once(line: StoreConnection, stub: Stub):
    stub.prepared = [[Ended(grpc.StatusCode.UNIMPLEMENTED)]]
    assert not ask(line)
    assert not ask(line)
    assert stub.calls == pytest.approx([5.0, 5.0], abs=1)
    assert len(stub.opened) == 1


def test_coordinator_with_too_many_streams_is_asked_again_later(
    line: StoreConnection, stub: Stub, monkeypatch: pytest.MonkeyPatch
):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stub.prepared = [[Ended(grpc.StatusCode.RESOURCE_EXHAUSTED)], [ON_STREAM]]
    assert not ask(line)
    assert not ask(line)
    now += CALLS_FOR
    assert ask(line)
    assert stub.calls == [5.0, 5.0]


def test_ended_stream_is_not_used(line: StoreConnection, stub: Stub):
    """Else its end would be a wait's, and speak against the relay that it went through."""
    stub.prepared = [[ON_STREAM, Ended(grpc.StatusCode.UNAVAILABLE)], [ON_STREAM]]
    assert ask(line)
    stub.opened[0][0].active = False
    assert ask(line)
    assert [stream.cancelled for stream, _ in stub.opened] == [True, False]


def test_operation_on_a_stream_takes_little_longer_than_a_call_may(
    line: StoreConnection, stub: Stub, monkeypatch: pytest.MonkeyPatch
):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def late(code: grpc.StatusCode, seconds: float) -> Callable[[], Ended]:
        def end() -> Ended:
            nonlocal now
            now += seconds
            return Ended(code)

        return end

    stub.prepared = [[ON_STREAM, late(grpc.StatusCode.UNAVAILABLE, 2 * SOON)]]
    assert ask(line)
    with pytest.raises(grpc.RpcError):
        ask(line)
    assert len(stub.opened) == 1, "its caller knows what time is left"
    stub.prepared = [[late(grpc.StatusCode.RESOURCE_EXHAUSTED, 2.0)], [ON_STREAM]]
    assert not ask(line)
    assert stub.calls == [3.0]
    now += CALLS_FOR
    assert ask(line, 300.0)
    assert stub.opened[-1][1] == 300.0 + SPARE


def test_large_operation_is_a_call(line: StoreConnection, stub: Stub):
    stub.prepared = [[ON_STREAM]]
    large = pb.CheckRequest(run_id="job", keys=["k" * MAX_BYTES])
    answer = line.ask(large, 5.0, ())
    assert isinstance(answer, pb.CheckResponse)
    assert (answer.present, stub.opened) == (False, [])


def test_answer_to_another_operation_is_not_accepted(line: StoreConnection, stub: Stub):
    stub.prepared = [[pb.OperateResponse(wait=pb.WaitResponse())], [ON_STREAM]]
    assert not ask(line)
    assert stub.opened[0][0].cancelled
    assert ask(line)


def test_error_of_a_stream_keeps_nothing_alive(line: StoreConnection, stub: Stub):
    """The call that has ended holds its channel, which a child that is forked may have to do without."""
    gc.collect()
    gc.disable()
    try:
        stub.prepared = [[Ended(grpc.StatusCode.INVALID_ARGUMENT)]]
        with pytest.raises(grpc.RpcError) as caught:
            ask(line)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "it has ended"
        assert caught.value.trailing_metadata()
        del caught
        gone = weakref.ref(stub.opened.pop()[0])
        assert gone() is None
    finally:
        gc.enable()


def test_operation_is_a_call_while_another_uses_the_stream(line: StoreConnection, stub: Stub):
    waits, goes_on = threading.Event(), threading.Event()

    def wait() -> pb.OperateResponse:
        waits.set()
        assert goes_on.wait(PATIENCE)
        return ON_STREAM

    stub.prepared = [[wait]]
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(ask(line)))
    thread.start()
    assert waits.wait(PATIENCE)
    assert not ask(line)
    goes_on.set()
    thread.join(PATIENCE)
    assert answers == [True]


def test_interrupted_operations_answer_reaches_no_other_operation(line: StoreConnection, stub: Stub):
    stub.prepared = [[ON_STREAM, KeyboardInterrupt()], [ON_STREAM]]
    assert ask(line)
    with pytest.raises(KeyboardInterrupt):
        ask(line)
    assert ask(line)
    assert len(stub.opened) == 2
    assert stub.opened[0][0].cancelled


def test_stream_ends_when_its_store_is_collected(line: StoreConnection, stub: Stub):
    stub.prepared = [[ON_STREAM]]
    line = StoreConnection(line.target, line.channel)
    assert ask(line)
    stream = stub.opened[0][0]
    del line
    gc.collect()
    assert stream.cancelled
    assert next(stream.said, None) is None


def test_exit_ends_the_stream_and_later_operations_are_calls(
    line: StoreConnection, stub: Stub, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(call_threads, "_open", set())
    monkeypatch.setattr(call_threads, "_exiting", False)
    stub.prepared = [[ON_STREAM]]
    assert ask(line)
    call_threads._end_streams()
    assert stub.opened[0][0].cancelled
    assert not ask(line)
    assert len(stub.opened) == 1


def test_forked_child_leaves_the_stream_of_its_parent_alone(
    line: StoreConnection, stub: Stub, monkeypatch: pytest.MonkeyPatch
):
    stub.prepared = [[ON_STREAM]]
    assert ask(line)
    assert line._stream is not None
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    line._stream.end()
    assert not stub.opened[0][0].cancelled
