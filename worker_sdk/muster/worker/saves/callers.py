"""Where a write happens: in a forked child, or in a worker process that was spawned once."""

import os
import select
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess, current_process
from typing import Protocol

from muster.worker.saves import child
from muster.worker.saves.failure import MOST_TEXT, ending_text, failure_text
from muster.worker.saves.request import AsyncRequest
from muster.worker.saves.staging import Held, HostBuffers, synchronize


@dataclass(frozen=True, slots=True)
class Ending:
    """How a write ended."""

    failure: str | None
    """Why it failed; None if it succeeded."""
    seconds: float
    """From its start."""


class Write(Protocol):
    """A write under way."""

    pid: int
    """The process that writes."""
    preload_seconds: float
    """How long it took to bring the tensors to the host."""
    start_seconds: float
    """How long it then took to hand the work over: the fork, or the pipe."""

    def wait(self, timeout: float) -> Ending:
        """Wait for its end, and end it if it takes longer.

        Args:
            timeout: seconds from its start.
        """
        ...

    def abort(self, reason: str) -> None:
        """End it now; :meth:`wait` then says for what reason."""
        ...


class AsyncCaller(Protocol):
    """Starts writes."""

    def start(self, request: AsyncRequest) -> Write:
        """Bring the tensors to the host, and start to write aside."""
        ...

    def close(self) -> None:
        """Let go of what is kept between writes."""
        ...


# ---------------------------------------------------------------------- fork


class ForkCaller:
    """A child for each write. It sees the memory as it was at the fork, for the price of a page table."""

    def start(self, request: AsyncRequest) -> Write:
        """Fork a child that writes."""
        began = time.monotonic()
        request = request.preloaded()
        synchronize()
        preloaded = time.monotonic()
        ours, theirs = os.pipe()
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # Else the child would write it once more.
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            child.run(request.write, theirs, parent)
        os.close(theirs)
        # The request holds the host's buffers, which must not be used again while the child reads them:
        # pinned memory is not copied on write.
        return ForkedWrite(pid, ours, preloaded - began, time.monotonic() - preloaded, request)

    def close(self) -> None:
        """Nothing is kept."""


class ForkedWrite:
    """A forked child that writes."""

    def __init__(
        self, pid: int, report: int, preload_seconds: float, start_seconds: float, request: AsyncRequest
    ) -> None:
        self.pid = pid
        self.preload_seconds = preload_seconds
        self.start_seconds = start_seconds
        self._report = report
        self._started = time.monotonic()
        self._request: AsyncRequest | None = request
        self._handle = os.pidfd_open(pid)
        self._reason: str | None = None

    def wait(self, timeout: float) -> Ending:
        """Wait for the child's end, and read what it reports."""
        left = max(0.0, self._started + timeout - time.monotonic())
        if not select.select([self._handle], [], [], left)[0]:
            self.abort(
                f"the writing process (pid {self.pid}) had not ended after {timeout:g} s, and was killed"
            )
        _, status = os.waitpid(self.pid, 0)
        seconds = time.monotonic() - self._started
        said = os.read(self._report, MOST_TEXT * 2).decode("utf-8", "replace")
        os.close(self._report)
        os.close(self._handle)
        self._request = None
        failure = ending_text(os.waitstatus_to_exitcode(status))
        if failure is not None:
            failure = self._reason or (f"{failure}: {said}" if said else failure)
        return Ending(failure, seconds)

    def abort(self, reason: str) -> None:
        """SIGKILL the child."""
        self._reason = reason
        try:
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        except OSError:
            return  # It has ended.


# ---------------------------------------------------------------------- spawn


class PersistentCaller:
    """A worker process, spawned once, that writes one request after the other.

    For processes that cannot fork safely. Requests are pickled, so functions must be importable; tensors are
    copied to shared memory. A worker that died is replaced at the next request.
    """

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._buffers = HostBuffers(shared=True)

    def start(self, request: AsyncRequest) -> Write:
        """Hand the request to the worker, and wait until it has the tensors."""
        began = time.monotonic()
        if self._worker is None or not self._worker.process.is_alive():
            self.close()
            self._worker = _Worker()
        request = request.preloaded()
        held = self._buffers.stage([request.async_fn_args, request.async_fn_kwargs])
        args, kwargs = held.state
        request = request._replace(async_fn_args=tuple(args), async_fn_kwargs=kwargs, finalize_fns=[])
        preloaded = time.monotonic()
        self._worker.pipe.send(request)
        return SpawnedWrite(self._worker, preloaded - began, time.monotonic() - preloaded, held)

    def close(self) -> None:
        """End the worker, if it has nothing to do any more."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None


class _Worker:
    def __init__(self) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def end(self) -> None:
        self.pipe.close()
        self.process.join()
        self.process.close()


class SpawnedWrite:
    """A request that a worker process writes."""

    def __init__(self, worker: _Worker, preload_seconds: float, start_seconds: float, held: Held) -> None:
        assert worker.process.pid is not None
        self.pid = worker.process.pid
        self.preload_seconds = preload_seconds
        self.start_seconds = start_seconds
        self._worker = worker
        self._started = time.monotonic()
        self._held = held
        self._reason: str | None = None

    def wait(self, timeout: float) -> Ending:
        """Wait for the worker's answer, or its end."""
        left = max(0.0, self._started + timeout - time.monotonic())
        worker = self._worker
        if not worker.pipe.poll(left):
            self.abort(
                f"the writing process (pid {self.pid}) had not ended after {timeout:g} s, and was killed"
            )
        try:
            failure: str | None = worker.pipe.recv()
        except (EOFError, ConnectionError):
            worker.process.join()
            failure = self._reason or ending_text(worker.process.exitcode or 0) or "the writing process ended"
        self._held.release()
        return Ending(failure, time.monotonic() - self._started)

    def abort(self, reason: str) -> None:
        """SIGKILL the worker."""
        self._reason = reason
        self._worker.process.kill()


def _too_long(pid: int, timeout: float) -> str:
    return f"the writing process (pid {pid}) had not ended after {timeout:g} s, and was killed"


def _work(pipe: Connection) -> None:
    """The worker: write what comes, answer how it went, end with the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # It ends with the pipe; what it writes with may need processes of its own.
    current_process().daemon = False
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        try:
            request.write()
            pipe.send(None)
        except BaseException as error:
            pipe.send(failure_text(error))
