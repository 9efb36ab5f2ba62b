"""The saves of one process, in order: scheduled, written aside, decided by all ranks, finalized."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import TracebackType

from muster.worker.barriers import GrpcBarrier
from muster.worker.decision import Decision, Outcome
from muster.worker.errors import AsyncSaveError, MusterError, OutcomeUnknownError
from muster.worker.pending import EarlyWarning
from muster.worker.saves import drop_in
from muster.worker.saves.callers import AsyncCaller, ForkCaller, PersistentCaller, Write
from muster.worker.saves.calls import Call, SaveTimings, State
from muster.worker.saves.failure import different_saves, early_hint, failure_text
from muster.worker.saves.groups import Group, default_barrier
from muster.worker.saves.limits import check_timeout
from muster.worker.saves.priority import Priority
from muster.worker.saves.request import AsyncRequest

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT = 1200.0
"""Seconds for a write and for the others' writes; Orbax's default for an asynchronous save."""
EARLY_WARNING = 10.0
"""Seconds, beyond as long again as its own write took, after which a rank logs whom a queue's first save
waits for. Ranks write for about as long as each other: who is later than that has often not begun. It is soon
enough for the one who has just started the job, and well below the timeout."""


class AsyncCallsQueue:
    """Saves aside, and finalizes a save only when every rank has written.

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
        self._barrier = barrier or default_barrier()
        self._commits = self._barrier.sibling(f"{self._barrier.prefix}/commit")
        self._agreement = self._barrier.sibling(f"{self._barrier.prefix}/agreement")
        priority = Priority(cpu_priority, io_priority)
        self._caller = caller or (PersistentCaller(priority) if persistent else ForkCaller())
        self._timeout = timeout
        self._on_saved = on_saved
        self._lock = threading.RLock()
        """Entered by itself: an interrupt in a condition's own entry or exit, which are Python, leaves it
        held."""
        self._changed = threading.Condition(self._lock)
        self._state = State()
        self._thread: threading.Thread | None = None
        """Decides. None before the first save, after a close or an abort, and where none could be started."""
        self._ending = threading.RLock()
        """Held by who ends the queue: two of them, and the slower would end what was opened again."""
        self.next_idx = 0
        """The number of the save that is scheduled next."""
        self._group = Group.of(self._barrier)
        self._owner = os.getpid()
        self._open = False
        self._may_go_on = False
        """Whether it was aborted, and not closed."""
        self._agreed = False
        """Whether a save was released: all ranks make the same saves."""
        self._aborted_at: int | None = None
        """The number that came next when it was last aborted; None if it never was."""
        self._begin()
        drop_in.made.add(self)

    def __del__(self) -> None:
        """Nobody holds it any more, and all that it scheduled is decided. Nothing here may wait."""
        if getattr(self, "_open", False) and os.getpid() == self._owner and not sys.is_finalizing():
            self._group.drop()
            self._say_closing()
            if self._state.calls:
                logger.warning("%d saves were not finalized: their queue is gone", len(self._state.calls))

    @classmethod
    def get_instances(cls) -> list["AsyncCallsQueue"]:
        """The queues that this process has made and holds."""
        return list(drop_in.made)

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
        if error is not None:
            self.abort(f"the training process failed: {type(error).__name__}: {error}")
            self._end()
        else:
            self.close()

    # ------------------------------------------------------------------ what users call

    def schedule_async_request(
        self,
        async_request: AsyncRequest,
        *,
        on_written: Callable[[], None] | None = None,
        commit: Callable[[Decision], None] | None = None,
        on_decided: Callable[[], None] | None = None,
        name: str = "",
        prepared: float = 0.0,
    ) -> int:
        """Start a save; the training thread waits for the copy to the host and the fork only.

        Args:
            async_request: what to write, and what to do when every rank has written.
            on_written: called, on another thread, when this rank's write has ended, well or not: what it
                read may be used again.
            commit: called, on another thread, when every rank has written, with that decision. The save is
                finalized when it has succeeded on every rank.
            on_decided: called, on another thread, when the ranks know how the save ended: for cleaning up,
                which nobody should wait for.
            name: for errors and the log; default: ``save`` and its number.
            prepared: seconds that the training thread has waited for this save already: for a plan, a copy.

        Returns:
            The save's number.

        Raises:
            TypeError: a function is not callable.
            MusterError: the queue is closed.
            Exception: what the preload function raised, or the fork, or pickling. The save counts and has
                failed, for all ranks.
        """
        async_request = AsyncRequest.of(async_request)
        async_request.check()
        self.check_open()
        request = async_request.freeze()._replace(call_idx=self.next_idx)
        write: Write | None = None
        try:
            if request.async_fn is not None:
                write = self._caller.start(request)
            self._add(request, name, write, None, on_written, commit, on_decided, prepared)
        except BaseException as error:
            # The other ranks count this save, too: they must learn of it, and stay in step.
            failure = "it was interrupted"
            try:
                failure = failure_text(error)
                if write is not None:
                    write.abort(failure)
            finally:
                if self.next_idx == request.call_idx:
                    self._add(request, name, write, failure, on_written, on_decided=on_decided)
                else:
                    self._ensure_decider()
            raise
        return request.call_idx

    def schedule_failure(
        self, reason: str, name: str = "", on_decided: Callable[[], None] | None = None
    ) -> int:
        """Take the place of a save that this rank cannot even begin: it fails, for all ranks.

        Args:
            reason: why; every rank reads it.
            name: as :meth:`schedule_async_request`.
            on_decided: as :meth:`schedule_async_request`.

        Returns:
            The save's number.

        Raises:
            MusterError: the queue is closed.
        """
        self.check_open()
        request = AsyncRequest(None, (), [], is_frozen=True, call_idx=self.next_idx)
        self._add(request, name, None, reason, on_decided=on_decided)
        return request.call_idx

    def check_open(self) -> None:
        """Refuse what a closed queue cannot do; one that was aborted goes on.

        Raises:
            MusterError: the queue is closed, or another process's; or it was aborted, and the outcome of a
                save is not known here.
            ValueError: it was aborted, and another queue has its group meanwhile.
        """
        if os.getpid() != self._owner:
            raise MusterError(
                f"this queue of saves was made by process {self._owner}, from which this one was forked. "
                "Make another one here, of other ranks."
            )
        if not self._open and self._may_go_on:
            self._begin()
        with self._lock:
            if self._state.closing:
                raise MusterError("this queue of saves is closed; make another one.")

    def _add(
        self,
        request: AsyncRequest,
        name: str,
        write: Write | None,
        failure: str | None,
        on_written: Callable[[], None] | None = None,
        commit: Callable[[Decision], None] | None = None,
        on_decided: Callable[[], None] | None = None,
        prepared: float = 0.0,
    ) -> None:
        # What is written must not be kept until the end: it may be large.
        request = request._replace(async_fn=None, async_fn_args=(), async_fn_kwargs={}, preload_fn=None)
        preload, start = (write.preload_seconds, write.start_seconds) if write is not None else (0.0, 0.0)
        timings = SaveTimings(request.call_idx, prepared + preload, start)
        name = name or f"save {request.call_idx}"
        call = Call(request, name, write, timings, on_written, commit, on_decided, failure)
        try:
            with self._lock:
                # No call between these: who interrupts comes after one, and is to find all of them or none.
                self._state.decide = self._decide_all
                self.next_idx = request.call_idx + 1
                self._state.calls.append(call)
        finally:
            self._ensure_decider()

    def _ensure_decider(self) -> None:
        """Wake the thread that decides; start one if there is none, or decide here if that fails."""
        with self._lock:
            self._changed.notify_all()
            if self._state.decider is not None:
                return
        serve = partial(_serve, self._lock, self._changed, self._state)
        try:
            thread = threading.Thread(target=serve, name="muster-saves", daemon=True)
            thread.start()
            self._thread = thread
        except RuntimeError as error:
            logger.warning("saves are decided by the training thread, which waits: %s", error)
            serve(lasting=False)

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
        if no_dist and not blocking and not self._may_be_ready():
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
        return len(self._state.calls)

    def abort(self, reason: str) -> None:
        """End every write that is under way: its save fails, for all ranks."""
        with self._lock:
            for call in self._state.undecided:
                if call.write is not None:
                    call.write.abort(reason)

    def close(self, abort: bool = False) -> None:
        """Finalize every save that was scheduled, and let go of the writers; no child is left.

        Args:
            abort: end the writes that are under way, rather than wait for them: their saves fail, for all
                ranks. Nothing is finalized; the log names what was committed. A queue that was aborted goes
                on with the next save that is scheduled, unless the outcome of one is not known.

        Raises:
            AsyncSaveError: a save was not committed; the others were finalized. Of several errors, the
                first is raised.
            OutcomeUnknownError: the coordinator could not be reached for as long as a save may take.
            MusterError: it is called by what a save calls when it is written or decided.
        """
        if self._state.decider is threading.current_thread():
            raise MusterError(
                "what a save calls cannot close its queue, which waits for that save. Close it elsewhere."
            )
        self._may_go_on = abort and (self._open or self._may_go_on)
        if not self._open and not self._state.calls:
            return
        if abort:
            self._aborted_at = self.next_idx
            self.abort("its queue was closed, and aborted what was under way")
            self._end()
            self._drop()
            return
        failed: Exception | None = None
        self._say_closing()
        try:
            while self._state.calls:
                try:
                    self.maybe_finalize_async_calls(blocking=True, no_dist=True)
                except Exception as error:
                    failed = failed or error
        finally:
            self._end()
        if failed is not None:
            raise failed

    def _drop(self) -> None:
        """Let go of what was decided, and finalize none of it."""
        failed: MusterError | None = None
        # One that another thread has scheduled in the meantime is still to be decided.
        while (call := self._take_decided()) is not None:
            error = call.failed()
            if error is None:
                logger.warning("%s was committed; it is not finalized here: its queue was aborted", call.name)
            failed = failed or error
        if failed is not None:
            raise failed

    def _begin(self) -> None:
        self._group.take()
        # No call from here on: an interrupt comes after one.
        self._state.closing, self._state.unknown, self._open = False, None, True

    def _end(self) -> None:
        with self._ending:
            self._say_closing()
            thread = self._thread
            if thread is not None:
                thread.join()
            if self._thread is thread:
                self._thread = None
            self._caller.close()
            if self._open:
                self._group.give_back()
            self._open = False

    def _say_closing(self) -> None:
        with self._lock:
            self._state.closing = True
            self._changed.notify_all()

    def _get_async_caller(self) -> AsyncCaller:
        """What starts its writes: nvidia-resiliency-ext's tests look at it."""
        return self._caller

    # ------------------------------------------------------------------ the training thread

    def _may_be_ready(self) -> bool:
        """Whether the oldest save is decided.

        Training asks after every step, and mostly it is not: this takes no lock, and a third of the time in
        cold caches.
        """
        try:
            return self._state.calls[0].decided
        except IndexError:
            return False

    def _take_decided(self) -> Call | None:
        """The oldest save, if it is decided: another thread may have taken those that were counted."""
        with self._lock:
            calls = self._state.calls
            return calls.popleft() if calls and calls[0].decided else None

    def _ready(self, blocking: bool, no_dist: bool) -> int:
        """How many saves, from the oldest on, are to be finalized now."""
        with self._lock:
            calls = self._state.calls
            if blocking:
                self._changed.wait_for(lambda: all(call.decided for call in calls) or self._is_lost())
                if not calls or calls[-1].decided:
                    return len(calls)
                assert self._state.unknown is not None
                raise self._state.unknown
            ready = next((n for n, call in enumerate(calls) if not call.decided), len(calls))
            scheduled = len(calls)
        if no_dist or not scheduled:
            return ready
        return min(int(count) for count in self._agreement.gather(str(ready).encode()))

    def _is_lost(self) -> bool:
        # A queue that closes gives up by itself, and decides its calls.
        return self._state.unknown is not None and not self._state.closing

    def _finalize_oldest(self, count: int) -> list[int]:
        finalized: list[int] = []
        for _ in range(count):
            if (call := self._take_decided()) is None:
                break
            try:
                self._finalize(call)
            except AsyncSaveError as error:
                error.finalized = tuple(finalized)
                raise
            finalized.append(call.request.call_idx)
        return finalized

    def _finalize(self, call: Call) -> None:
        error = call.failed()
        if error is not None:
            raise error
        began = time.monotonic()
        call.request.execute_finalize_fns()
        timings = replace(call.timings, finalize=time.monotonic() - began)
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
        if self._on_saved is not None:
            self._on_saved(timings)

    # ------------------------------------------------------------------ the deciding thread

    def _decide_all(self) -> None:
        """Wait for each write's end, arrive at the save's barrier, and keep the decision; in order."""
        while True:
            with self._lock:
                call = next(iter(self._state.undecided), None)
                if call is None:
                    self._state.decide = None
                    return
            self._decide(call)
            with self._lock:
                self._changed.notify_all()
            if call.on_decided is not None:
                try:
                    call.on_decided()
                except BaseException:  # As torch's errors of a checkpoint are; later saves need this thread.
                    logger.exception("%s is over; cleaning up failed", call.name)
            del call  # Its finalize functions may hold a state, and the next save may be far.

    def _decide(self, call: Call) -> None:
        try:
            failure, seconds = self._written(call)
            began = time.monotonic()
            decision = self._vote(
                self._barrier, failure, self._since_abort(call), self._early_warning(call, seconds)
            )
            voted = time.monotonic()
            call.written = decision.released
            different = different_saves(decision.payloads)
            self._agreed = self._agreed or (decision.released and different is None)
            if decision.released and call.commit is not None:
                decision = self._vote(self._commits, different or _failure_of(call.commit, decision))
            elif decision.released and different is not None:
                decision = replace(decision, outcome=Outcome.ABORTED, message=different)
            call.timings = replace(
                call.timings, write=seconds, vote=voted - began, commit=time.monotonic() - voted
            )
            call.decision = decision
            logger.info("%s is decided: %s", call.name, decision.message)
        except OutcomeUnknownError as error:
            self._group.doubt(call.name)
            call.error = error
        except MusterError as error:
            call.error = error
        except BaseException as error:  # Whatever it is, the saves that follow need this thread.
            logger.exception("%s cannot be decided", call.name)
            call.error = MusterError(f"{call.name} cannot be decided: {error!r}")

    def _written(self, call: Call) -> tuple[str | None, float]:
        """Wait for the end of a call's write: why it failed, and how long it took."""
        failure, seconds = call.failure, 0.0
        try:
            if call.write is not None:
                ending = call.write.wait(self._timeout)
                failure, seconds = failure or ending.failure, ending.seconds
                how = "failed" if failure is not None else "is done; the other ranks' are waited for"
                logger.info("%s: this rank's write, %.3f s, %s", call.name, seconds, how)
        except BaseException as error:
            # Not knowing how it ended is a failure too; not to vote would have the others wait for us.
            logger.exception("%s: its write cannot be judged", call.name)
            failure = failure_text(error)
        try:
            if call.on_written is not None:
                call.on_written()
        except BaseException as error:
            logger.exception("%s: what follows its write failed", call.name)
            failure = failure or failure_text(error)
        return failure, seconds

    def _early_warning(self, call: Call, seconds: float) -> EarlyWarning | None:
        """Of a save that perhaps only some ranks make; this rank's write took so many seconds."""
        if self._agreed:
            return None
        return EarlyWarning(EARLY_WARNING + seconds, early_hint(call.name, self._barrier.rank))

    def _since_abort(self, call: Call) -> bytes:
        """How many saves came before it since the last abort, for ranks that aborted at different points.

        Before any abort there is nothing to say, and nothing that each rank must be sent of every other. Nor
        does one that says nothing differ: its program may have had no cause to abort, or be an older one.
        """
        if self._aborted_at is None or call.request.call_idx < self._aborted_at:
            return b""
        return str(call.request.call_idx - self._aborted_at).encode()

    def _vote(
        self,
        barrier: GrpcBarrier,
        failure: str | None,
        payload: bytes = b"",
        early: EarlyWarning | None = None,
    ) -> Decision:
        while True:
            unknown = self._state.unknown
            if unknown is not None and self._state.closing:
                # Nor can a later save be decided: its barrier is the group's next one.
                raise unknown
            try:
                decision = barrier.vote(failure, self._timeout, payload, early)
            except OutcomeUnknownError as error:
                # The write has ended and its outcome is decided, or will be: ask until someone knows.
                logger.warning("%s", error)
                self._set_unknown(error)
            else:
                self._set_unknown(None)
                return decision

    def _set_unknown(self, error: OutcomeUnknownError | None) -> None:
        with self._lock:
            self._state.unknown = error
            self._changed.notify_all()


def _serve(
    lock: threading.RLock, changed: threading.Condition, state: State, *, lasting: bool = True
) -> None:
    """Decide what comes, unless somebody does; between saves this holds nothing of the queue.

    It is one thread for all saves: a fork beside one that begins or ends may leave its child a lock of the
    loader that nobody gives back.

    Args:
        lock: guards the state.
        changed: is notified of its changes.
        state: of the queue.
        lasting: until the queue is closed or gone; else only what there is.
    """
    claimant = threading.current_thread()
    try:
        with lock:
            if state.decider is not None:
                return
            state.decider = claimant
        while True:
            with lock:
                changed.wait_for(lambda: state.decide is not None or state.closing or not lasting)
                decide = state.decide
                if decide is None:
                    state.decider = None
                    return
            decide()
            del decide
    except BaseException:
        if state.decider is claimant:
            state.decider = None
        raise


def _failure_of(commit: Callable[[Decision], None], decision: Decision) -> str | None:
    try:
        commit(decision)
    except BaseException as error:
        return failure_text(error)
    return None
