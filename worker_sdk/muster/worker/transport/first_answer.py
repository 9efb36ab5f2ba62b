"""The limit for a coordinator that accepts a stream and then sends nothing on it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Timer

import grpc

FIRST_ANSWER_TIMEOUT = 30.0
"""Seconds that a peer has to send its first message after it accepted a stream."""


class NoFirstAnswerError(grpc.RpcError):
    """A stream's peer sent nothing in time."""

    def code(self) -> grpc.StatusCode:
        """Return the status of a call that has run out of time."""
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        """Return what happened, for people."""
        return f"it accepted the stream and sent nothing for {FIRST_ANSWER_TIMEOUT:g} s"

    def trailing_metadata(self) -> tuple[()]:
        """Return nothing: the peer sent no metadata."""
        return ()


@contextmanager
def first_answer_expected(call: grpc.Call) -> Iterator[Callable[[], None]]:
    """Cancel a stream if its peer sends nothing within ``FIRST_ANSWER_TIMEOUT``.

    Args:
        call: the stream.

    Yields:
        A function to call when the first message has come.

    Raises:
        NoFirstAnswerError: the stream was cancelled for that reason.
    """
    late = Event()

    def give_up() -> None:
        late.set()
        call.cancel()

    timer = Timer(FIRST_ANSWER_TIMEOUT, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield timer.cancel
    except grpc.RpcError as error:
        if not late.is_set():
            raise
        # The error is the call, which its own traceback would keep alive.
        error.with_traceback(None)
        raise NoFirstAnswerError from None
    finally:
        timer.cancel()
