"""Signals to this process that request a save of all ranks."""

import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import NamedTuple

import grpc

from muster.client.calls import reason_of
from muster.client.errors import EnvironmentValueError
from muster.client.replicas import Search, replicas_of
from muster.v1 import run_pb2, run_pb2_grpc
from muster.worker import environment
from muster.worker.barriers import GrpcBarrier
from muster.worker.transport.channel import open_channel
from muster.worker.transport.fork_guard import start_thread
from muster.worker.transport.unary import ask_leader

logger = logging.getLogger(__name__)

ATTEMPT = 10.0
"""Seconds for one attempt to request a save. Attempts go on until the coordinator answers."""
FINAL = frozenset(
    {
        *("RUN_NOT_FOUND", "RUN_FORGOTTEN", "INVALID_ARGUMENT", "ROLE_TOO_LOW", "RUN_NOT_ALLOWED"),
        # The job goes on in a newer generation, and this process ends.
        "STALE_GENERATION",
    }
)
"""Refusals that another attempt would not change."""
PAUSE = 1.0
"""Seconds between two attempts."""


class _Taken(NamedTuple):
    """A signal that this process got."""

    signal: int
    known: int
    """The newest request that was known when it came."""
    at: float
    """Seconds on the monotonic clock."""


class Notices:
    """Turns signals into requests to all ranks for a save, after which training is to end.

    A signal's previous handler is still called if it was set in Python. The default action of a signal is not
    carried out.

    Args:
        signals: the signals.
        barrier: the group of the saves; names this process.

    Raises:
        ValueError: this is not the main thread, or a signal cannot be handled.
    """

    def __init__(self, signals: Iterable[signal.Signals], barrier: GrpcBarrier) -> None:
        config = barrier.config
        self._barrier = barrier
        self._config = config
        self._owner = os.getpid()
        self._replicas = replicas_of(config.endpoint)
        self._taken: queue.SimpleQueue[_Taken | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self.signalled = False
        """Whether this process got one of the signals."""
        self._before = {one: signal.getsignal(one) for one in signals}
        if self._before:
            start_thread("a save point", f"muster-notices-{config.rank}", self._run)
        try:
            for one in self._before:
                signal.signal(one, self._take)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Restore the signals' previous handlers."""
        self._closed.set()
        self._taken.put(None)
        if threading.current_thread() is not threading.main_thread():
            return
        for one, handler in self._before.items():
            if signal.getsignal(one) == self._take:
                signal.signal(one, handler if handler is not None else signal.SIG_DFL)

    def _take(self, number: int, frame: FrameType | None) -> None:
        # Nothing here may wait: the signal interrupts the main thread at any place.
        handler = self._before.get(signal.Signals(number))
        if os.getpid() != self._owner or self._closed.is_set():
            # Signals end a forked child, such as a data loader, as without a save point.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.signalled = True
        asked = self._barrier.save_asked
        self._taken.put(_Taken(number, asked.number if asked is not None else 0, time.monotonic()))
        if callable(handler):
            handler(number, frame)

    def _run(self) -> None:
        while (taken := self._taken.get()) is not None:
            self._ask(taken)

    def _ask(self, taken: "_Taken") -> None:
        """Request a save until the coordinator answers. If all ranks get a signal, it is one request."""
        config, name = self._config, signal.Signals(taken.signal).name
        deadline = _deadline(taken)
        request = run_pb2.RequestSaveRequest(
            run_id=config.run_id,
            stop=True,
            by=f"rank {config.rank} ({config.host})",
            reason=name,
            known_number=taken.known,
            generation=config.generation,
        )
        while not self._closed.is_set():
            if deadline is not None:
                request.deadline_ms = max(1, round((deadline - time.monotonic()) * 1000))
            search = Search(self._replicas)
            try:
                ask_leader(search, open_channel, _request_save, request, ATTEMPT, wait=True)
                logger.warning("%s: a save of all ranks is asked for, after which training is to end", name)
                return
            except EnvironmentValueError as error:
                logger.warning("%s: no save could be asked for: %s", name, error)
            except grpc.RpcError as error:
                logger.warning("%s: no save could be asked for: %s", name, search.said)
                if reason_of(error) in FINAL or error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return
            self._closed.wait(PAUSE)


def _deadline(taken: _Taken) -> float | None:
    """Return when this process will be killed after a signal, on the monotonic clock; None: not known."""
    timeout = environment.shutdown_timeout() if taken.signal == signal.SIGTERM else None
    return taken.at + timeout if timeout is not None else None


def _request_save(
    channel: grpc.Channel,
) -> "grpc.UnaryUnaryMultiCallable[run_pb2.RequestSaveRequest, run_pb2.RequestSaveResponse]":
    return run_pb2_grpc.RunServiceStub(channel).RequestSave
