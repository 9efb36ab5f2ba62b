"""Where a write happens: in a forked child, or in a worker process that was spawned once."""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context, process, resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.managers import BaseProxy
from multiprocessing.process import BaseProcess, current_process
from typing import ClassVar, Protocol

from muster.worker.errors import MusterError
from muster.worker.insight import saves
from muster.worker.saves.failure import ending_text, failure_text
from muster.worker.saves.memory.gpus import synchronize
from muster.worker.saves.memory.host_memory import Location
from muster.worker.saves.memory.staging import Held, HostBuffers, unshared
from muster.worker.saves.request import AsyncRequest
from muster.worker.saves.writers import child, forking, handover
from muster.worker.saves.writers.priority import Priority
from muster.worker.saves.writers.writer_process import WriterProcess
from muster.worker.transport.fork_guard import handlers_hint

logger = logging.getLogger(__name__)

DEFAULT_PRIORITY = Priority()
"""That of this process."""
ENDING_TIMEOUT = 10.0
"""Seconds that an idle worker has to end before it is killed."""
MAX_WAITING = 32
"""Requests that a worker has not answered: the pipe has room for their messages, and nobody waits."""


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

        A process that was killed and does not end is given up after a grace period: the write has failed, and
        the process is waited for on another thread.

        Args:
            timeout: seconds from its start.
        """
        ...

    def abort(self, reason: str) -> None:
        """End it now; :meth:`wait` then says for what reason."""
        ...


class AsyncCaller(Protocol):
    """Starts writes."""

    def start(self, request: AsyncRequest, wait_for_copies: Callable[[], None] | None = None) -> Write:
        """Bring the tensors to the host, and start to write in the background.

        Args:
            request: what to write.
            wait_for_copies: waits for copies that a GPU still makes, to memory that this process shares with
                its children. Nothing is read there before it has returned.
        """
        ...

    def close(self) -> None:
        """Let go of what is kept between writes."""
        ...


# ---------------------------------------------------------------------- fork


class ForkCaller:
    """A child for each write. It sees the memory as it was at the fork, for the price of a page table.

    A fork does not shield shared memory. So tensors and NumPy arrays there are copied first: those in the
    arguments, in containers and objects in these, and in a bound method or partial that writes. A function
    that has a tensor from its surroundings must copy it itself.
    """

    def __init__(self) -> None:
        if hint := handlers_hint():
            logger.warning("saves are written by forked children, but %s", hint)

    def start(self, request: AsyncRequest, wait_for_copies: Callable[[], None] | None = None) -> Write:
        """Fork a child that writes, while copies to the memory that it shares still go on."""
        began = time.monotonic()
        request = _on_host(request, wait_for_copies is not None)
        preloaded = time.monotonic()
        forked = forking.fork(request.write, wait_for_copies)
        try:
            # The request holds the host's buffers, which must not be used again while the child reads them:
            # pinned ones are shared with it.
            return ForkedWrite(forked, preloaded - began, time.monotonic() - preloaded, request)
        except BaseException:
            forked.end()
            saves.end(forked.process.pid)
            raise

    def close(self) -> None:
        """Nothing is kept."""


def _on_host(request: AsyncRequest, copies_awaited: bool) -> AsyncRequest:
    """Return the same request with a state that a forked child sees as it is now.

    Args:
        request: the request.
        copies_awaited: whether its tensors are in buffers of saves, where the copies to them are waited for.
    """
    if request.preload_fn is not None:
        request, copies_awaited = request.preloaded(), False
    if not copies_awaited:
        # First of all: pinned memory, to which copies may be under way, can be shared memory, too.
        synchronize()
    function, args, kwargs = unshared((request.async_fn, request.async_fn_args, request.async_fn_kwargs))
    return request._replace(async_fn=function, async_fn_args=args, async_fn_kwargs=kwargs)


class ForkedWrite:
    """A forked child that writes."""

    def __init__(
        self, forked: forking.Child, preload_seconds: float, start_seconds: float, request: AsyncRequest
    ) -> None:
        self.pid = forked.process.pid
        self.preload_seconds = preload_seconds
        self.start_seconds = start_seconds
        self._child = forked
        self._started = time.monotonic()
        self._request: AsyncRequest | None = request
        saves.begin(self.pid)

    def wait(self, timeout: float) -> Ending:
        """Wait for the child's end, and read what it reports."""
        process = self._child.process
        left = self._started + timeout - time.monotonic()
        if not process.wait(left) and process.reason is None:
            self.abort(_too_long(self.pid, timeout))
            process.wait(0)
        self._request = None
        seconds = time.monotonic() - self._started
        if not process.ended():
            process.reap_later(self._finish)
            return Ending(process.stuck_text(), seconds)
        return Ending(self._finish(), seconds)

    def _finish(self) -> str | None:
        """Reap the child, which has ended, and say why the write failed, if it did."""
        try:
            status = self._child.process.status()
            written, said = child.read_report(self._child.report, self.pid)
        finally:
            saves.end(self.pid)
            self._child.close()
        reason, text = self._child.process.reason, ending_text(status)
        if not written or (status and reason is not None):
            return reason or (f"{text}: {said}" if said else text)
        if status:
            logger.warning("a save was written; then %s (pid %d) %s", text, self.pid, said)
        return None

    def abort(self, reason: str) -> None:
        """SIGKILL the child."""
        self._child.process.kill(reason)


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

    def start(self, request: AsyncRequest, wait_for_copies: Callable[[], None] | None = None) -> Write:
        """Put the request into shared memory, and tell the worker; nobody waits until it reads that."""
        began = time.monotonic()
        if wait_for_copies is not None:
            wait_for_copies()
        worker = self._usable_worker()
        held, location = self._on_host(request)
        preloaded = time.monotonic()
        try:
            return worker.send(location, held, preloaded - began, preloaded)
        except BaseException as error:
            # It may have half of a message, or a request that nobody waits for any more.
            worker.kill(f"it was handed a request, and then: {failure_text(error)}")
            held.release()
            raise

    def _usable_worker(self) -> "_Worker":
        if self._worker is None or not self._worker.usable():
            # Writes that the last one has not answered still hold it, and learn how it ended.
            self._worker = self._started()
        if len(self._worker.unanswered) >= MAX_WAITING:
            raise MusterError(
                f"the writing process (pid {self._worker.pid}) has {MAX_WAITING} saves still to write. Save "
                "less often, or wait for some of them: maybe_finalize_async_calls(blocking=True)."
            )
        return self._worker

    def _on_host(self, request: AsyncRequest) -> tuple[Held, Location]:
        """Copy the request to shared memory. Return that memory, and where the request is in it."""
        request = request.preloaded()
        arguments = dict(enumerate(request.async_fn_args)) | request.async_fn_kwargs
        # A manager's proxy stands for what the manager holds, and goes as it is: its copy would be that.
        proxies = {key: value for key, value in arguments.items() if isinstance(value, BaseProxy)}
        held = self._buffers.stage({key: arguments[key] for key in arguments if key not in proxies})
        try:
            arguments = held.state | proxies
            request = request._replace(
                async_fn_args=tuple(arguments[number] for number in range(len(request.async_fn_args))),
                async_fn_kwargs={name: arguments[name] for name in request.async_fn_kwargs},
                finalize_fns=[],
            )
            held.wait()  # Objects may look at their tensors when they are pickled.
            return held, handover.pickle_into(held.memory, request)
        except BaseException:
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
        self.unanswered: set[int] = set()
        """The numbers of requests."""
        self._numbers = count()
        self._owner = os.getpid()
        self.process: BaseProcess = context.Process(target=_work, args=arguments, daemon=True)
        # Its first start unblocks signals: it is to be over.
        resource_tracker.ensure_running()
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, child.IGNORED)
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        theirs.close()
        assert self.process.pid is not None
        self.pid = self.process.pid
        self._writer = WriterProcess(self.pid)
        # Before multiprocessing waits for its processes when this one ends, or when nobody holds it any more.
        util.Finalize(self, _abandon, args=(self._writer,), exitpriority=0)
        self._reaping = threading.Lock()
        self._given_up = False

    def usable(self) -> bool:
        """Whether it lives, and is this process's: a forked child may not ask after its parent's."""
        return self._owner == os.getpid() and self._writer.reason is None and self.alive()

    def send(self, location: Location, held: Held, preload_seconds: float, began: float) -> "SpawnedWrite":
        """Tell it of a request.

        Args:
            location: where the request is in the memory.
            held: the memory.
            preload_seconds: how long it took to put it there.
            began: when that was done, by ``time.monotonic``.
        """
        number = next(self._numbers)
        handover.send(self.pipe, self.pid, number, location, held.memory)
        return SpawnedWrite(self, number, preload_seconds, time.monotonic() - began, held)

    def kill(self, reason: str) -> None:
        """SIGKILL it; what it has not answered has failed for that reason."""
        self._writer.kill(reason)

    def alive(self) -> bool:
        return not self._writer.ended()

    def answer(self, number: int, timeout: float, too_long: str) -> str | None:
        """Wait for its answer to a request. Return why the request failed; None if it did not.

        Args:
            number: the request's.
            timeout: seconds; then it is killed.
            too_long: why it is killed then.
        """
        writer = self._writer
        if not writer.wait(timeout, (self.pipe.fileno(),)) and writer.reason is None:
            self.kill(too_long)
            writer.wait(0, (self.pipe.fileno(),))
        try:
            if not self.pipe.poll():
                raise EOFError  # A process that the worker started may hold the pipe's other end.
            failure: str | None
            answered, failure = self.pipe.recv()
            if answered != number:
                self.kill(f"it answered request {answered} where {number} was waited for")
                raise EOFError
            return failure
        except (EOFError, ConnectionError):
            return self._ending()

    def _ending(self) -> str:
        """Wait for its end, and return how it ended."""
        if not self._writer.wait(ENDING_TIMEOUT):
            self.kill("it had closed its pipe, and did not end")
            self._writer.wait(0)
        if self.alive():
            self._give_up()
            return self._writer.stuck_text()
        return self._writer.reason or ending_text(self._status())

    def _status(self) -> int | None:
        with self._reaping:
            self.process.join()
            return self.process.exitcode

    def _give_up(self) -> None:
        """Wait for it no longer, neither here nor in multiprocessing when this process ends."""
        with self._reaping:
            if not self._given_up:
                self._given_up = True
                process._children.discard(self.process)  # type: ignore[attr-defined]
                self._writer.reap_later(self._status)

    def end(self) -> None:
        # Not by closing the pipe: a process that was forked meanwhile may hold it open.
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self._ending()
        self.pipe.close()


def _abandon(writer: WriterProcess) -> None:
    """End a worker that nobody holds any more. The garbage collector may call this: do not wait."""
    writer.kill("nobody needs it any more")
    writer.close()


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
        worker.unanswered.add(number)
        saves.begin(worker.pid)

    def wait(self, timeout: float) -> Ending:
        """Wait for the worker's answer, or its end."""
        left = self._started + timeout - time.monotonic()
        try:
            failure = self._worker.answer(self._number, left, _too_long(self.pid, timeout))
        finally:
            saves.end(self.pid)
            self._worker.unanswered.discard(self._number)
        self._held.release()
        return Ending(failure, time.monotonic() - self._started)

    def abort(self, reason: str) -> None:
        """SIGKILL the worker."""
        self._worker.kill(reason)


def _too_long(pid: int, timeout: float) -> str:
    return f"the writing process (pid {pid}) had not ended after {timeout:g} s (its timeout), and was killed"


def _work(pipe: Connection, parent: int, priority: Priority) -> None:
    """The worker: write what comes, answer how it went, end when told to or with the parent."""
    priority.take()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child.ignore_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, child.IGNORED)
    threading.Thread(target=child.die_with, args=(parent,), daemon=True).start()
    # What it writes with may need processes of its own, which a daemon may not have.
    current_process().daemon = False
    with contextlib.suppress(EOFError):
        while (received := handover.receive(pipe)) is not None:
            failure = None
            try:
                received.request().write()
            except BaseException as error:
                failure = failure_text(error)
            pipe.send((received.number, failure))
            del received
