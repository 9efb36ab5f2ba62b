"""The threads in which gRPC serves a stream, and their end before that of the interpreter.

gRPC serves a stream with two daemon threads. The interpreter kills daemon threads when it ends, wherever they
are. If one holds a lock of gRPC then, the destructors of the stream and its channel wait for it for ever: a
process that has finished does not end, and torchrun's agents wait for it.

So a stream that may be open at the exit is followed: an exit hook ends it and waits for its threads.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

import grpc

Request = TypeVar("Request")

PATIENCE = 1.0
"""Seconds that the exit waits for the threads of all streams; a few ms are usual."""

_followed: set["CallThreads[Any]"] = set()
_exits = False


class CallThreads(Generic[Request]):
    """The two threads of one stream.

    Args:
        requests: what the stream sends.
    """

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests = requests
        self._sender: Future[threading.Thread] = Future()
        self._receiver: Future[threading.Thread] = Future()
        """Known when the stream has ended."""
        self.end: Callable[[], object] = lambda: None
        """Ends the stream. A second call changes nothing."""

    def requests(self) -> Iterator[Request]:
        """Yield what the stream sends. gRPC iterates on the thread that sends."""
        self._sender.set_result(threading.current_thread())
        yield from self._requests

    def follow(self, call: grpc.Call, end: Callable[[], object]) -> None:
        """Let the exit of the process end the stream and wait for the threads.

        Args:
            call: the stream, which sends :meth:`requests`.
            end: see :attr:`end`.
        """
        self.end = end
        # gRPC calls back on the thread that receives. It refuses if the stream has ended already.
        if call.add_callback(lambda: self._receiver.set_result(threading.current_thread())):
            # Other threads may add theirs meanwhile.
            _followed.difference_update([one for one in _followed.copy() if not one.running])
            _followed.add(self)

    @property
    def running(self) -> bool:
        """Whether one of the threads may still run."""
        return not all(
            thread.done() and not thread.result().is_alive() for thread in (self._sender, self._receiver)
        )

    def join(self, deadline: float) -> None:
        """Wait until the threads have ended, or for the deadline.

        Args:
            deadline: monotonic time.
        """
        for thread in (self._sender, self._receiver):
            with suppress(TimeoutError):
                thread.result(deadline - time.monotonic()).join(max(deadline - time.monotonic(), 0.0))


def exits() -> bool:
    """Return whether the process exits: a stream opened now would be open at the end of the interpreter."""
    return _exits


def _exit() -> None:
    global _exits
    _exits = True
    # Streams of one channel share a thread: it ends with the last of them.
    followed = _followed.copy()
    for threads in followed:
        threads.end()
    deadline = time.monotonic() + PATIENCE
    for threads in followed:
        threads.join(deadline)


os.register_at_fork(after_in_child=_followed.clear)
atexit.register(_exit)
