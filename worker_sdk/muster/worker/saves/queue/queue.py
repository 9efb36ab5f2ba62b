"""The saves of one process: scheduled in order, written in the background, decided by all, finalized."""

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Any
from weakref import WeakSet

from muster.worker.barriers import GrpcBarrier
from muster.worker.decision import Decision
from muster.worker.errors import AsyncSaveError, MusterError
from muster.worker.groups.write_report import WriteReport
from muster.worker.saves.failure import failure_text
from muster.worker.saves.limits import check_timeout
from muster.worker.saves.queue.calls import EMPTY_REPORT, Call, SaveTimings
from muster.worker.saves.queue.effects import DecidedSave, QueueEnded, View
from muster.worker.saves.queue.events import (
    Abandoned,
    Abort,
    CheckOpen,
    Close,
    EndWrites,
    Event,
    Forget,
    GetView,
    Reserve,
    Take,
    Wait,
    WriteStarted,
)
from muster.worker.saves.queue.groups import Group, default_barrier
from muster.worker.saves.queue.queue_loop import QueueLoop
from muster.worker.saves.queue.save_traces import SaveTraces
from muster.worker.saves.queue.states import QueueState
from muster.worker.saves.queue.voter import Voter
from muster.worker.saves.request import AsyncRequest
from muster.worker.saves.writers.callers import AsyncCaller, ForkCaller, PersistentCaller
from muster.worker.saves.writers.priority import Priority

logger = logging.getLogger("muster.worker.saves.queue")  # As users know it.

_queues: WeakSet["AsyncCallsQueue"] = WeakSet()
"""The queues of this process that somebody holds."""

DEFAULT_TIMEOUT = 1200.0
"""Seconds for a write and for the others' writes; Orbax's default for an asynchronous save."""


class _Ticket:
    """Belongs to the frame that begins a save. When the frame is gone, the save is abandoned, if not filled.

    The caller may be interrupted between any two bytecodes, also while it handles an interrupt. But its frame
    ends in any case, and the ticket with it. The callback of the ticket's weak reference then hands the event
    in without a bytecode. After the save was filled the event is stale, and changes nothing. While a
    traceback keeps the frame, the thread's next save or the end of the queue has the same effect.
    """

    __slots__ = ("__weakref__",)


class AsyncCallsQueue:
    """Saves in the background, and finalizes a save only when every rank has written.

    When a rank's write has ended, well or not, the rank says so at the save's barrier; the decision comes
    back by push and is kept in this process. All ranks must schedule the same saves in the same order.

    Args:
        persistent: write in a worker process that is spawned once; default: fork a child for each save.
        barrier: decides the saves; default: one of group ``save`` (of ``save-2``, and so on, for each further
            queue that is open), taken from the environment. It must be used for nothing else.
        timeout: seconds for a write, from its start; a child that takes longer is killed, and has failed.
            The other ranks' writes are waited for as long again.
        on_saved: called with the timings of each save that was finalized.
        caller: starts the writes, instead of the two kinds that ``persistent`` chooses from.
        cpu_priority: the worker's nice value, from 0 to 19; default: this process's.
        io_priority: the worker's class of I/O scheduling, as ionice(1) numbers them; default: this process's.
        is_daemon, sigterm_timeout, cpu_shm_mode: what nvidia-resiliency-ext's callers say of its worker.
            There is nothing to choose here: the worker ends with this process and may start processes of
            its own, is killed when it is aborted, and is handed tensors in shared memory.

    Raises:
        ConnectError: the coordinator could not be reached.
        RefusedError: it refused this process.
        ValueError: another queue that is open decides by the same group; there is no such priority; or the
            timeout is not a finite number above 0.
        MusterError: the group had a save whose outcome this rank does not know.
        RuntimeError: no thread can be started.
    """

    def __init__(
        self,
        persistent: bool = False,
        is_daemon: bool = True,
        cpu_priority: int | None = None,
        io_priority: int | None = None,
        sigterm_timeout: float = 0.0,
        cpu_shm_mode: bool = True,
        *,
        barrier: GrpcBarrier | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        on_saved: Callable[[SaveTimings], None] | None = None,
        caller: AsyncCaller | None = None,
    ) -> None:
        check_timeout(timeout)
        self._owner = os.getpid()
        self._barrier = barrier or default_barrier()
        commits = self._barrier.sibling(f"{self._barrier.prefix}/commit")
        self._agreement = self._barrier.sibling(f"{self._barrier.prefix}/agreement")
        priority = Priority(cpu_priority, io_priority)
        self._caller = caller or (PersistentCaller(priority) if persistent else ForkCaller())
        self._on_saved = on_saved
        self._traces = SaveTraces(self._barrier)
        voter = Voter(self._barrier, commits, timeout, self._traces)
        self._loop = QueueLoop(Group.of(self._barrier), self._caller, voter)
        # An interrupt can hide in __del__, but not in this.
        self._loop.watched = weakref.ref(self, self._loop.putter(Forget()))
        self.check_open()
        _queues.add(self)

    def __del__(self) -> None:
        """Nobody holds it any more, and all that it scheduled is decided. Nothing here may wait."""
        loop: QueueLoop | None = getattr(self, "_loop", None)
        if loop is None or os.getpid() != self._owner or sys.is_finalizing():
            return
        view = loop.view
        loop.drop_group()
        if view.state is QueueState.OPEN and view.unfinalized:
            logger.warning("%d saves were not finalized: their queue is gone", view.unfinalized)

    @classmethod
    def get_instances(cls) -> list["AsyncCallsQueue"]:
        """The queues that this process has made and holds."""
        return list(_queues)

    @classmethod
    def warmup_persistent_caller(
        cls,
        rank: int = 0,
        is_daemon: bool = True,
        cpu_priority: int | None = None,
        io_priority: int | None = None,
        sigterm_timeout: float = 0.0,
        cpu_shm_mode: bool = True,
    ) -> None:
        """Start a worker for the next persistent save of this process, which then does not wait for it.

        Args:
            rank: of this process, which the worker need not know.
            is_daemon: as the class has it, with what follows.
            cpu_priority: the worker's nice value.
            io_priority: its class of I/O scheduling.
            sigterm_timeout: of no effect.
            cpu_shm_mode: of no effect.

        Raises:
            ValueError: there is no such priority.
        """
        PersistentCaller.warm_up(Priority(cpu_priority, io_priority))

    def __enter__(self) -> "AsyncCallsQueue":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif os.getpid() == self._owner:
            self.abort(f"the training process failed: {type(error).__name__}: {error}")
            self._end(self._say_closing())

    # ------------------------------------------------------------------ what users call

    @property
    def next_idx(self) -> int:
        """The number of the save that is scheduled next."""
        return self._look().next_idx

    @property
    def undecided(self) -> int:
        """How many saves there are from the oldest undecided one to the newest."""
        return self._look().undecided

    def schedule_async_request(
        self,
        async_request: AsyncRequest,
        *,
        wait_for_copies: Callable[[], None] | None = None,
        on_written: Callable[[], None] | None = None,
        commit: Callable[[Decision], None] | None = None,
        on_decided: Callable[[], None] | None = None,
        name: str = "",
        prepared: float = 0.0,
        planned: float = 0.0,
        report: WriteReport = EMPTY_REPORT,
        word: Callable[[], bytes] = bytes,
    ) -> int:
        """Start a save; the training thread waits for the copy to the host and the fork only.

        Args:
            async_request: what to write, and what to do when every rank has written.
            wait_for_copies: waits for the copies that a GPU still makes to buffers that the request reads.
                Forked children share these, and are forked meanwhile.
            on_written: called, on another thread, when this rank's write has ended, well or not: what it
                read may be used again.
            commit: called, on another thread, when every rank has written, with that decision. The save is
                finalized when it has succeeded on every rank.
            on_decided: called, on another thread, when the ranks know how the save ended: for cleaning up,
                which nobody should wait for.
            name: for errors and the log; default: ``save`` and its number.
            prepared: seconds that the training thread has waited for this save already: for a plan, a copy.
            planned: the last seconds of these, for the plan.
            report: step and bytes of this rank's part, for people; its seconds are measured here.
            word: returns what the others hear of this rank's write in the decision; empty: nothing.

        Returns:
            The save's number.

        Raises:
            TypeError: a function is not callable.
            MusterError: the queue is closed.
            Exception: what the preload function raised, or the fork, or pickling. The save counts and has
                failed, for all ranks.
        """
        request = AsyncRequest.of(async_request)
        request.check()
        request = request.freeze()
        self._check_owner()
        kept = request._replace(async_fn=None, async_fn_args=(), async_fn_kwargs={}, preload_fn=None)
        call = Call(self, kept, name, on_written, commit, on_decided, prepared, planned, report, word)
        ticket = self._ticket(call, "it was interrupted")
        try:
            request = request._replace(call_idx=self._reserve(call))
            if request.async_fn is not None:
                # No signal is handled between the end of a function in Python and the next instruction.
                start = self._caller.start  # A caller of a user's own may know of no copies.
                call.write = start(request) if wait_for_copies is None else start(request, wait_for_copies)
            self._loop.post(WriteStarted(call))
        except BaseException as error:
            # The other ranks count this save, too: they must learn of it soon, and stay in step.
            self._loop.post(Abandoned(call, failure_text(error)))
            raise
        finally:
            del ticket
        return request.call_idx

    def schedule_failure(
        self,
        reason: str,
        name: str = "",
        on_decided: Callable[[], None] | None = None,
        report: WriteReport = EMPTY_REPORT,
    ) -> int:
        """Take the place of a save that this rank cannot even begin: it fails, for all ranks.

        Args:
            reason: why; every rank reads it.
            name: as :meth:`schedule_async_request`.
            on_decided: as :meth:`schedule_async_request`.
            report: as :meth:`schedule_async_request`.

        Returns:
            The save's number.

        Raises:
            MusterError: the queue is closed.
        """
        self._check_owner()
        call = Call(
            self, AsyncRequest(None, (), [], is_frozen=True), name, on_decided=on_decided, report=report
        )
        ticket = self._ticket(call, reason)
        try:
            return self._reserve(call)
        finally:
            del ticket

    def _ticket(self, call: Call, reason: str) -> _Ticket:
        ticket = _Ticket()
        call.ticket = weakref.ref(ticket, self._loop.putter(Abandoned(call, reason)))
        return ticket

    def _reserve(self, call: Call) -> int:
        number: int = self._ask(lambda asker: Reserve(call, threading.get_ident(), asker))
        return number

    def check_open(self) -> None:
        """Refuse what a closed queue cannot do; one that was aborted goes on.

        Raises:
            MusterError: the queue is closed, or another process's; or it was aborted, and the outcome of a
                save is not known here.
            ValueError: it was aborted, and another queue has its group meanwhile.
        """
        self._check_owner()
        if self._look().state is not QueueState.OPEN:
            self._ask(CheckOpen)

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalize the saves that every rank has written, oldest first.

        Args:
            blocking: wait for all saves that were scheduled.
            no_dist: look at what this process has been told, which costs nothing, and may find a save a
                little earlier or later than another rank does. Without it all ranks must call at the same
                point, and find the same saves: for finalize functions that hold collectives. It returns on no
                rank before every rank has finalized its own.

        Returns:
            The numbers of the saves that were finalized.

        Raises:
            AsyncSaveError: a save was not committed, on any rank; later ones can still be finalized.
            OutcomeUnknownError: waiting, the coordinator could not be reached for as long as a save may
                take; call again to wait on.
            BarrierError: without ``no_dist``, a save was committed, and another rank failed to finalize it.
            Exception: what a finalize function raised.
        """
        if no_dist and not blocking and not self._loop.view.ready:
            return []
        ready = self._ready(blocking, no_dist)
        # Waiting for all, a rank may have less to finalize than one that has not looked by itself before: all
        # of them meet, whatever they have done.
        meets = not no_dist and (blocking or ready > 0)
        try:
            finalized = self._finalize_oldest(ready)
        except AsyncSaveError:
            if meets:
                with suppress(MusterError):  # What failed is said already.
                    self._agreement.execute_barrier()
            raise
        except BaseException as error:
            if meets:
                self._agreement.abort(f"finalizing a save: {failure_text(error)}")
            raise
        if meets:
            self._agreement.execute_barrier()
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """How many saves were scheduled and are not finalized."""
        return self._look().unfinalized

    def abort(self, reason: str) -> None:
        """End every write that is under way: its save fails, for all ranks."""
        self._check_owner()
        self._loop.post(EndWrites(reason))

    def close(self, abort: bool = False) -> None:
        """Finalize every save that was scheduled, and let go of the writers; no child is left.

        Args:
            abort: end the writes that are under way, rather than wait for them: their saves fail, for all
                ranks. Nothing is finalized; the log names what was committed. A queue that was aborted goes
                on with the next save that is scheduled, unless the outcome of one is not known.

        Raises:
            AsyncSaveError: a save was not committed; the others were finalized. The first of
                several errors is raised.
            OutcomeUnknownError: the coordinator could not be reached for as long as a save may take.
            MusterError: it is called by what a save calls when it is written or decided.
        """
        self._refuse_own_threads("close its queue, which waits for that save. Close it elsewhere.")
        view = self._look()
        if view.state is QueueState.CLOSED and not view.unfinalized:
            return
        if abort:
            reason = "its queue was closed, and aborted what was under way"
            self._end(self._post(lambda asker: Abort(reason, asker)))
            return
        failed: Exception | None = None
        closing = self._say_closing()
        try:
            while self._look().unfinalized:
                try:
                    self.maybe_finalize_async_calls(blocking=True, no_dist=True)
                except Exception as error:
                    failed = failed or error
        finally:
            self._end(closing)
        if failed is not None:
            raise failed

    def _say_closing(self) -> SimpleQueue[Any]:
        return self._post(lambda asker: Close(threading.get_ident(), asker))

    def _end(self, asker: SimpleQueue[Any]) -> None:
        """Wait until the queue has ended."""
        over: QueueEnded = asker.get()
        if over.thread is not None:
            over.thread.join()
        if over.error is not None:
            raise over.error
        for outcome in over.dropped:
            if outcome.error is None:
                name = outcome.save.name
                logger.warning("%s was committed; it is not finalized here: its queue was aborted", name)
        for outcome in over.dropped:
            if outcome.error is not None:
                raise outcome.error

    def _get_async_caller(self) -> AsyncCaller:
        """What starts its writes: nvidia-resiliency-ext's tests look at it."""
        return self._caller

    # ------------------------------------------------------------------ what it asks the loop

    def _look(self) -> View:
        if self._loop.settled():
            return self._loop.view  # This needs no switch to the loop's thread.
        view: View = self._ask(GetView)
        return view

    def _ask(self, question: Callable[[SimpleQueue[Any]], Event]) -> Any:  # noqa: ANN401
        """Post a question, and wait for the loop's answer."""
        answer = self._post(question).get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _post(self, question: Callable[[SimpleQueue[Any]], Event]) -> SimpleQueue[Any]:
        self._check_owner()
        asker: SimpleQueue[Any] = SimpleQueue()
        self._loop.post(question(asker))
        return asker

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise MusterError(
                f"this queue of saves was made by process {self._owner}, from which this one was forked. "
                "Make another one here, of other ranks."
            )

    def _refuse_own_threads(self, what: str) -> None:
        if self._loop.runs_here():
            raise MusterError(f"what a save calls cannot {what}")

    # ------------------------------------------------------------------ finalizing

    def _ready(self, blocking: bool, no_dist: bool) -> int:
        """How many saves, from the oldest on, are to be finalized now."""
        view = self._look()
        if blocking and view.undecided:
            self._refuse_own_threads("wait for all saves of its queue, among which it is. Wait elsewhere.")
            ready: int = self._ask(lambda asker: Wait(threading.get_ident(), asker))
            return ready
        if no_dist or blocking or not view.unfinalized:
            return view.ready
        return min(int(count) for count in self._agreement.gather(str(view.ready).encode()))

    def _finalize_oldest(self, count: int) -> list[int]:
        finalized: list[int] = []
        for _ in range(count):
            outcome: DecidedSave | None = self._ask(Take)
            if outcome is None:
                break  # Another thread has taken those that were counted.
            try:
                self._finalize(outcome)
            except AsyncSaveError as error:
                error.finalized = tuple(finalized)
                raise
            finalized.append(outcome.save.idx)
        return finalized

    def _finalize(self, outcome: DecidedSave) -> None:
        if outcome.error is not None:
            raise outcome.error
        call: Call = outcome.save
        began = time.monotonic()
        call.request.execute_finalize_fns()
        ended = time.monotonic()
        timings = call.timings(ended - began)
        logger.info(
            "%s is finalized: preload %.3f s, start %.3f s, write %.3f s, vote %.3f s, commit %.3f s, "
            "finalize %.3f s",
            call.name,
            timings.preload,
            timings.start,
            timings.write,
            timings.vote,
            timings.commit,
            timings.finalize,
        )
        self._traces.finalized(call, began, ended)
        if self._on_saved is not None:
            self._on_saved(timings)
