"""Where a write happens: in a forked child, or in a worker process that was spawned once."""

import contextlib
import logging
import os
import signal
import threading
import time
import weakref
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.managers import BaseProxy
from multiprocessing.process import BaseProcess, current_process
from multiprocessing.reduction import ForkingPickler
from typing import ClassVar, Protocol

from muster.worker.fork_guard import handlers_hint
from muster.worker.insight import saves
from muster.worker.saves import child, forking
from muster.worker.saves.failure import MOST_TEXT, ending_text, failure_text
from muster.worker.saves.priority import Priority
from muster.worker.saves.request import AsyncRequest
from muster.worker.saves.staging import Held, HostBuffers, synchronize, unshared

logger = logging.getLogger(__name__)

DEFAULT_PRIORITY = Priority()
"""That of this process."""
ENDING_TIMEOUT = 10.0
"""Seconds that an idle worker has to end before it is killed."""


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
    """A child for each write. It sees the memory as it was at the fork, for the price of a page table.

    Tensors in shared memory are copied first, for a fork does not shield them. They are found in the
    arguments, and in dictionaries, lists and tuples there.
    """

    def __init__(self) -> None:
        if hint := handlers_hint():
            logger.warning("saves are written by forked children, but %s", hint)

    def start(self, request: AsyncRequest) -> Write:
        """Fork a child that writes."""
        began = time.monotonic()
        request = _unshared(request.preloaded())
        synchronize()
        preloaded = time.monotonic()
        forked = forking.fork(request.write)
        try:
            # The request holds the host's buffers, which must not be used again while the child reads them:
            # pinned memory is not copied on write.
            return ForkedWrite(forked, preloaded - began, time.monotonic() - preloaded, request)
        except BaseException:
            forked.end()
            saves.end(forked.pid)
            raise

    def close(self) -> None:
        """Nothing is kept."""


def _unshared(request: AsyncRequest) -> AsyncRequest:
    args, kwargs = unshared((request.async_fn_args, request.async_fn_kwargs))
    return request._replace(async_fn_args=args, async_fn_kwargs=kwargs)


class ForkedWrite:
    """A forked child that writes."""

    def __init__(
        self, forked: forking.Child, preload_seconds: float, start_seconds: float, request: AsyncRequest
    ) -> None:
        self.pid = forked.pid
        self.preload_seconds = preload_seconds
        self.start_seconds = start_seconds
        self._report = forked.report
        self._started = time.monotonic()
        self._request: AsyncRequest | None = request
        self._handle: int | None = os.pidfd_open(forked.pid)
        self._reason: str | None = None
        self._ending = threading.Lock()
        """Its handle is closed once, and not used afterwards: the number is soon another file's."""
        saves.begin(forked.pid)

    def wait(self, timeout: float) -> Ending:
        """Wait for the child's end, and read what it reports."""
        left = max(0.0, self._started + timeout - time.monotonic())
        assert self._handle is not None
        try:
            if not child.wait_readable(self._handle, left):
                self.abort(_too_long(self.pid, timeout))
            _, status = os.waitpid(self.pid, 0)
            seconds = time.monotonic() - self._started
            said = self._said()
        finally:
            self._let_go()
        failure = ending_text(os.waitstatus_to_exitcode(status))
        if failure is not None:
            failure = self._reason or (f"{failure}: {said}" if said else failure)
        return Ending(failure, seconds)

    def _let_go(self) -> None:
        saves.end(self.pid)
        with self._ending:
            if self._handle is not None:
                os.close(self._handle)
            self._handle = None
        os.close(self._report)
        self._request = None

    def _said(self) -> str:
        # A process that the child started may hold the pipe's other end: do not wait for it to be closed.
        os.set_blocking(self._report, False)
        with contextlib.suppress(BlockingIOError):
            said = os.read(self._report, MOST_TEXT * 2)
            return said.removeprefix(child.SIGN.pack(self.pid)).decode("utf-8", "replace")
        return ""

    def abort(self, reason: str) -> None:
        """SIGKILL the child."""
        self._reason = reason
        with self._ending, contextlib.suppress(OSError):  # It may have ended.
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)


# ---------------------------------------------------------------------- spawn


class PersistentCaller:
    """A worker process, spawned once, that writes one request after the other.

    For processes that cannot fork safely. Requests are pickled, so functions must be importable; tensors are
    copied to shared memory. A worker that died is replaced at the next request.

    Args:
        priority: the worker's.
    """

    _warm: ClassVar["_Worker | None"] = None

    def __init__(self, priority: Priority = DEFAULT_PRIORITY) -> None:
        self._priority = priority
        self._worker: _Worker | None = None
        self._buffers = HostBuffers(shared=True)
        self._numbers = count()

    def start(self, request: AsyncRequest) -> Write:
        """Hand the request to the worker, and wait until it has the tensors."""
        began = time.monotonic()
        if self._worker is None or not self._worker.usable():
            # Writes that the last one has not answered still hold it, and learn how it ended.
            self._worker = self._started()
        request = request.preloaded()
        arguments = dict(enumerate(request.async_fn_args)) | request.async_fn_kwargs
        # A manager's proxy stands for what the manager holds, and goes as it is: its copy would be that.
        proxies = {key: value for key, value in arguments.items() if isinstance(value, BaseProxy)}
        held = self._buffers.stage({key: arguments[key] for key in arguments if key not in proxies})
        arguments = held.state | proxies
        request = request._replace(
            async_fn_args=tuple(arguments[number] for number in range(len(request.async_fn_args))),
            async_fn_kwargs={name: arguments[name] for name in request.async_fn_kwargs},
            finalize_fns=[],
        )
        preloaded = time.monotonic()
        try:
            pickled = ForkingPickler.dumps(request)
        except BaseException:
            held.release()
            raise
        number = next(self._numbers)
        try:
            self._worker.pipe.send(number)
            self._worker.pipe.send_bytes(pickled)
            return SpawnedWrite(self._worker, number, preloaded - began, time.monotonic() - preloaded, held)
        except BaseException as error:
            # It may have half of a request, or one for whose answer nobody waits.
            self._worker.kill(f"it was handed a request, and then: {failure_text(error)}")
            held.release()
            raise

    @classmethod
    def warm_up(cls, priority: Priority) -> None:
        """Start a worker that the next one who needs one of this priority takes over.

        There is one at a time. It is kept until it is taken over, also if this asks for another priority.
        """
        if cls._warm is None or not cls._warm.usable():
            cls._warm = _Worker(priority)

    def _started(self) -> "_Worker":
        warm = PersistentCaller._warm
        if warm is None or not warm.usable() or warm.priority != self._priority:
            return _Worker(self._priority)
        PersistentCaller._warm = None
        return warm

    def _debug_is_async_process_running(self) -> bool:
        """Whether there is a worker: nvidia-resiliency-ext's tests look at it."""
        return self._worker is not None and self._worker.alive()

    def close(self) -> None:
        """End the worker, if it has nothing to do any more."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None


class _Worker:
    def __init__(self, priority: Priority) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, os.getpid(), priority)
        self.priority = priority
        self._owner = os.getpid()
        self.process: BaseProcess = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        assert self.process.pid is not None
        self.pid = self.process.pid
        handle = os.pidfd_open(self.pid)
        self._handle = handle
        weakref.finalize(self, _let_go, handle, self._owner).atexit = False
        self.reason: str | None = None
        """Why it was killed."""
        self._reaping = threading.Lock()

    def usable(self) -> bool:
        """Whether it lives, and is this process's: a forked child may not ask after its parent's."""
        return self._owner == os.getpid() and self.reason is None and self.alive()

    def kill(self, reason: str) -> None:
        """SIGKILL it; what it has not answered has failed for that reason."""
        self.reason = self.reason or reason
        self.process.kill()

    def alive(self) -> bool:
        with self._reaping:
            return self.process.is_alive()

    def exit_status(self) -> int:
        """Wait for its end."""
        with self._reaping:
            self.process.join()
            return self.process.exitcode or 0

    def wait(self, timeout: float | None) -> bool:
        """Wait for its answer, or its end. Returns whether there is one of them."""
        return bool(wait([self.pipe, self._handle], timeout))

    def end(self) -> None:
        # Not by closing the pipe: a process that was forked meanwhile may hold it open.
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        if not wait([self._handle], ENDING_TIMEOUT):
            self.process.kill()
        self.exit_status()
        self.pipe.close()


def _let_go(handle: int, owner: int) -> None:
    """Nobody holds a worker or its writes any more. This may be the garbage collector: do not wait."""
    if os.getpid() == owner:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    os.close(handle)


class SpawnedWrite:
    """A request that a worker process writes."""

    def __init__(
        self, worker: _Worker, number: int, preload_seconds: float, start_seconds: float, held: Held
    ) -> None:
        self.pid = worker.pid
        self.preload_seconds = preload_seconds
        self.start_seconds = start_seconds
        self._worker = worker
        self._number = number
        self._started = time.monotonic()
        self._held = held
        saves.begin(worker.pid)

    def wait(self, timeout: float) -> Ending:
        """Wait for the worker's answer, or its end."""
        try:
            failure = self._failure(timeout)
        finally:
            saves.end(self.pid)
        self._held.release()
        return Ending(failure, time.monotonic() - self._started)

    def _failure(self, timeout: float) -> str | None:
        left = max(0.0, self._started + timeout - time.monotonic())
        worker = self._worker
        if not worker.wait(left):
            self.abort(_too_long(self.pid, timeout))
            worker.wait(None)
        try:
            if not worker.pipe.poll():
                raise EOFError  # A process that the worker started may hold the pipe's other end.
            failure: str | None
            answered, failure = worker.pipe.recv()
            if answered != self._number:
                worker.kill(f"it answered request {answered} where {self._number} was waited for")
                raise EOFError
        except (EOFError, ConnectionError):
            status = worker.exit_status()
            failure = worker.reason or ending_text(status) or "the writing process ended"
        return failure

    def abort(self, reason: str) -> None:
        """SIGKILL the worker."""
        self._worker.kill(reason)


def _too_long(pid: int, timeout: float) -> str:
    return f"the writing process (pid {pid}) had not ended after {timeout:g} s (its timeout), and was killed"


def _work(pipe: Connection, parent: int, priority: Priority) -> None:
    """The worker: write what comes, answer how it went, end when told to or with the parent."""
    priority.take()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=child.die_with, args=(parent,), daemon=True).start()
    # What it writes with may need processes of its own, which a daemon may not have.
    current_process().daemon = False
    while True:
        try:
            number = pipe.recv()
        except EOFError:
            return
        if number is None:
            return
        failure = None
        try:
            pipe.recv().write()
        except EOFError:
            return
        except BaseException as error:
            failure = failure_text(error)
        pipe.send((number, failure))
