"""The limit for a coordinator that accepts a stream and then sends nothing on it."""

from collections.abc import Callable

import grpc
import pytest

from muster.client.calls import explain
from muster.worker.transport import first_answer
from muster.worker.transport.first_answer import NoFirstAnswerError, first_answer_expected


class Clock:
    """Stands in for ``threading.Timer``; the test lets its time pass."""

    def __init__(self, seconds: float, then: Callable[[], None]) -> None:
        assert seconds == 30.0
        self._then: Callable[[], None] | None = then
        _clocks.append(self)

    def start(self) -> None: ...

    def cancel(self) -> None:
        self._then = None

    def run_out(self) -> None:
        if self._then is not None:
            self._then()


_clocks: list[Clock] = []


@pytest.fixture(autouse=True)
def clocks(monkeypatch: pytest.MonkeyPatch) -> list[Clock]:
    """Every timer that was made."""
    _clocks.clear()
    monkeypatch.setattr(first_answer, "Timer", Clock)
    return _clocks


class Call:
    """A stream."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Cancelled(grpc.RpcError):
    """How gRPC ends it then."""


def test_silent_stream_is_cancelled_and_the_error_says_why(clocks: list[Clock]):
    call = Call()
    with pytest.raises(NoFirstAnswerError) as caught, first_answer_expected(call):  # type: ignore[arg-type]
        clocks[0].run_out()
        raise Cancelled
    assert call.cancelled
    assert explain(caught.value) == (
        "timeout (DEADLINE_EXCEEDED: it accepted the stream and sent nothing for 30 s)"
    )
    cause = caught.value.__context__
    assert cause is not None
    assert cause.__traceback__ is None, "the call would keep itself alive"


def test_answered_stream_may_be_silent_afterwards(clocks: list[Clock]):
    call = Call()
    with first_answer_expected(call) as answered:  # type: ignore[arg-type]
        answered()
        clocks[0].run_out()
    assert not call.cancelled


def test_stream_that_ends_by_itself_keeps_its_error_and_ends_the_timer(clocks: list[Clock]):
    call = Call()
    with pytest.raises(Cancelled), first_answer_expected(call):  # type: ignore[arg-type]
        raise Cancelled
    clocks[0].run_out()
    assert not call.cancelled
