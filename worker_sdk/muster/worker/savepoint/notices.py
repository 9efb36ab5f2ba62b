"""Signals to this process that request a save of all ranks."""

import logging
import os
import queue
import signal
import threading
from collections.abc import Iterable
from types import FrameType

import grpc

from muster.client.calls import reason_of
from muster.client.errors import EnvironmentValueError
from muster.client.replicas import Search, replicas_of
from muster.v1 import run_pb2, run_pb2_grpc
from muster.worker.barriers import GrpcBarrier
from muster.worker.transport.channel import open_channel
from muster.worker.transport.fork_guard import start_thread
from muster.worker.transport.unary import ask_leader

logger = logging.getLogger(__name__)

ATTEMPT = 10.0
"""Seconds for one attempt to request a save. Attempts go on until the coordinator answers."""
FINAL = frozenset({"RUN_NOT_FOUND", "RUN_FORGOTTEN", "INVALID_ARGUMENT", "ROLE_TOO_LOW", "RUN_NOT_ALLOWED"})
"""Refusals that another attempt would not change."""
PAUSE = 1.0
"""Seconds between two attempts."""


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
        self._taken: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
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
        self._taken.put((number, asked.number if asked is not None else 0))
        if callable(handler):
            handler(number, frame)

    def _run(self) -> None:
        while (taken := self._taken.get()) is not None:
            number, known = taken
            self._ask(signal.Signals(number).name, known)

    def _ask(self, name: str, known: int) -> None:
        """Request a save until the coordinator answers.

        Args:
            name: the signal's.
            known: the newest request that was known when the signal came. If all ranks get the signal, the
                coordinator makes one request of it.
        """
        config = self._config
        request = run_pb2.RequestSaveRequest(
            run_id=config.run_id,
            stop=True,
            by=f"rank {config.rank} ({config.host})",
            reason=name,
            known_number=known,
        )
        while not self._closed.is_set():
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


def _request_save(
    channel: grpc.Channel,
) -> "grpc.UnaryUnaryMultiCallable[run_pb2.RequestSaveRequest, run_pb2.RequestSaveResponse]":
    return run_pb2_grpc.RunServiceStub(channel).RequestSave
