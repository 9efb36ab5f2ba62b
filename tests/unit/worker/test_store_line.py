"""The stream of a store: what travels on it, what does not, and what comes after it has ended."""

import gc
import inspect
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from muster.client.replicas import Target
from muster.v1 import store_pb2 as pb
from muster.worker import store_line
from muster.worker.channel import SharedChannel
from muster.worker.store_line import CALLS, NAMES, TIMEOUTS, StoreLine
from tests.support.patience import PATIENCE

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


class Stream:
    """One that answers as it is told, and then ends."""

    def __init__(self, said: Iterator[pb.OperateRequest], answers: list[Any]) -> None:
        self.said = said
        self.answers = answers
        self.cancelled = False

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
    monkeypatch.setattr(store_line, "StoreServiceStub", lambda _: stub)
    return stub


@pytest.fixture
def line(stub: Stub) -> StoreLine:
    channel: Any = None
    return StoreLine(Target("host:1"), SharedChannel(channel, ()))


def ask(line: StoreLine, timeout: float | None = 5.0) -> bool:
    answer = line.ask(CHECK, timeout, ())
    assert isinstance(answer, pb.CheckResponse)
    return answer.present


def test_every_request_has_its_name_on_a_stream_and_its_call():
    assert set(CALLS) == {*NAMES, "muster.v1.OperateRequest"}
    assert NAMES["muster.v1.StoreServiceGetRequest"] == "get"
    assert CALLS["muster.v1.StoreServiceGetRequest"] == "Get"


def test_operations_share_a_stream(line: StoreLine, stub: Stub):
    stub.prepared = [[ON_STREAM] * 3]
    assert all(ask(line) for _ in range(3))
    assert [timeout for _, timeout in stub.opened] == [5.0 * TIMEOUTS]


def test_a_stream_for_ever_has_no_deadline(line: StoreLine, stub: Stub):
    stub.prepared = [[ON_STREAM] * 2, [ON_STREAM]]
    assert ask(line, None)
    assert ask(line, None)
    assert ask(line, 5.0), "which needs one"
    assert [timeout for _, timeout in stub.opened] == [None, 5.0 * TIMEOUTS]


def test_one_that_leaves_too_little_time_is_not_used(
    line: StoreLine, stub: Stub, monkeypatch: pytest.MonkeyPatch
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
def test_one_that_has_ended_since_it_was_used_is_opened_anew(line: StoreLine, stub: Stub, end: Exception):
    stub.prepared = [[ON_STREAM, end], [ON_STREAM]]
    assert ask(line)
    assert ask(line)
    assert (len(stub.opened), stub.calls) == (2, [])


def test_a_wait_that_is_lost_is_its_callers_to_send_again_with_what_time_is_left(line: StoreLine, stub: Stub):
    stub.prepared = [[ON_STREAM, Ended(grpc.StatusCode.UNAVAILABLE)]]
    assert ask(line)
    with pytest.raises(Ended):
        line.ask(pb.WaitRequest(run_id="job", keys=["k"], timeout_ms=5000), 5.0, ())


def test_a_new_one_that_ends_without_a_word_is_left_for_a_call(line: StoreLine, stub: Stub):
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
def test_how_a_new_one_ends_is_the_operations_end(line: StoreLine, stub: Stub, code: grpc.StatusCode):
    stub.prepared = [[Ended(code)], [ON_STREAM]]
    with pytest.raises(Ended):
        ask(line)
    assert stub.calls == []
    assert ask(line)


def test_a_refusal_is_not_asked_for_twice(line: StoreLine, stub: Stub):
    stub.prepared = [[ON_STREAM, Ended(grpc.StatusCode.INVALID_ARGUMENT)], [ON_STREAM]]
    assert ask(line)
    with pytest.raises(Ended):
        ask(line)
    assert ask(line)
    assert len(stub.opened) == 2


def test_a_coordinator_that_knows_no_streams_is_not_asked_for_one_again(line: StoreLine, stub: Stub):
    stub.prepared = [[Ended(grpc.StatusCode.UNIMPLEMENTED)]]
    assert not ask(line)
    assert not ask(line)
    assert stub.calls == [5.0, 5.0]


def test_one_that_holds_enough_of_them_is_called_and_asked_again_later(line: StoreLine, stub: Stub):
    stub.prepared = [[Ended(grpc.StatusCode.RESOURCE_EXHAUSTED)], [ON_STREAM]]
    assert not ask(line)
    assert ask(line)


def test_while_one_waits_others_are_calls(line: StoreLine, stub: Stub):
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


def test_an_answer_that_nobody_waited_for_is_nobody_elses(line: StoreLine, stub: Stub):
    stub.prepared = [[ON_STREAM, KeyboardInterrupt()], [ON_STREAM]]
    assert ask(line)
    with pytest.raises(KeyboardInterrupt):
        ask(line)
    assert ask(line)
    assert len(stub.opened) == 2
    assert stub.opened[0][0].cancelled


def test_it_ends_with_its_line(line: StoreLine, stub: Stub):
    stub.prepared = [[ON_STREAM]]
    line = StoreLine(line.target, line.channel)
    assert ask(line)
    stream = stub.opened[0][0]
    del line
    gc.collect()
    assert stream.cancelled
    assert next(stream.said, None) is None
