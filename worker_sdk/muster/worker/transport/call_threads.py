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
from typing import Any, Generic, TypeVar

import grpc

Request = TypeVar("Request")

PATIENCE = 1.0
"""Seconds that the exit waits for the threads of all streams; a few ms are usual."""

_open: set["CallThreads[Any]"] = set()
_threads: set[threading.Thread] = set()
"""Those of open streams, and of ended ones. Streams of one channel share the thread that receives, which ends
with the last of them."""
_exiting = False


class CallThreads(Generic[Request]):
    """The two threads of one stream.

    Args:
        requests: what the stream sends.
    """

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests = requests
        self.ended = threading.Event()
        """Set by the thread that receives."""
        self.end: Callable[[], object] = lambda: None
        """Ends the stream. A second call changes nothing."""

    def requests(self) -> Iterator[Request]:
        """Yield what the stream sends. gRPC iterates on the thread that sends."""
        _threads.add(threading.current_thread())
        yield from self._requests

    def follow(self, call: grpc.Call, end: Callable[[], object]) -> None:
        """Let the exit of the process end the stream and wait for the threads.

        Args:
            call: the stream, which sends :meth:`requests`.
            end: see :attr:`end`.
        """
        self.end = end
        # Other threads may add theirs meanwhile.
        _threads.difference_update([thread for thread in _threads.copy() if not thread.is_alive()])
        _open.add(self)
        # gRPC calls back on the thread that receives. It refuses if the stream has ended already.
        if not call.add_callback(self._call_ended):
            _open.discard(self)

    def _call_ended(self) -> None:
        _threads.add(threading.current_thread())
        _open.discard(self)
        self.ended.set()


def is_exiting() -> bool:
    """Return whether the process exits: a stream opened now would be open at the end of the interpreter."""
    return _exiting


def _end_streams() -> None:
    global _exiting
    _exiting = True
    still_open = _open.copy()
    for stream in still_open:
        stream.end()
    deadline = time.monotonic() + PATIENCE
    for stream in still_open:
        stream.ended.wait(max(deadline - time.monotonic(), 0.0))
    for thread in _threads - {threading.current_thread()}:
        thread.join(max(deadline - time.monotonic(), 0.0))


os.register_at_fork(after_in_child=_open.clear)
os.register_at_fork(after_in_child=_threads.clear)
atexit.register(_end_streams)
