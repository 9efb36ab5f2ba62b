"""The place in a training loop where all ranks save at one step, when that is asked for."""

import logging
import operator
import signal
import threading
import time
from collections.abc import Iterable
from types import TracebackType

from muster.client.save_votes import PREFIX
from muster.worker.barriers import DEFAULT_INIT_TIMEOUT, GrpcBarrier
from muster.worker.decision import Outcome
from muster.worker.errors import MusterError, OutcomeUnknownError, error_for
from muster.worker.savepoint.agreement import Course, Next
from muster.worker.savepoint.notices import Notices
from muster.worker.session.save_request import SaveAsked, time_left
from muster.worker.transport.fork_guard import start_thread

logger = logging.getLogger(__name__)

OVER = "its training is over"
"""Why a rank whose save point is closed fails later requests."""
DEFAULT_TIMEOUT = 600.0
"""Seconds. A step may take long, and a rank looks at requests only between two steps."""


class SavePoint:
    """All ranks save at one agreed step, and stop if the request says so; or no rank does.

    A save is requested by ``muster save``, by ``RunService.RequestSave``, or by a signal to any rank::

        point = SavePoint(signals=[signal.SIGTERM])
        for step in range(start, steps):
            train(step)
            if point.reached(step):
                checkpointer.save(step, state)
                checkpointer.finalize(blocking=True)
                point.done()
                if point.stop:
                    break

    Every rank makes a save point, and calls :meth:`reached` after the same steps. If a rank dies or the
    timeout expires, no rank saves. The request stays open for the next generation of the job, unless it ends
    training.

    Args:
        signals: signals to this process that request a save of all ranks, after which training ends. Only the
            main thread may name any. Their previous handlers are still called.
        timeout_secs: seconds that a rank waits for the others, counted by the coordinator from the first one.
        rank: this process's; default as in :class:`~muster.worker.GrpcBarrier`.
        world_size: the number of ranks; default as in :class:`~muster.worker.GrpcBarrier`.
        endpoint: the coordinator's; default: ``MUSTER_ENDPOINT``.
        run_id: the training job; default as in :class:`~muster.worker.GrpcBarrier`.
        generation: the job's life; default as in :class:`~muster.worker.GrpcBarrier`.

    Attributes:
        stop: whether training is to end after the last save.

    Raises:
        ConnectError: the coordinator could not be reached in time.
        RefusedError: it refused this process.
        ValueError: an argument is not usable, or this is not the main thread and signals are named.
    """

    def __init__(
        self,
        signals: Iterable[signal.Signals] = (),
        timeout_secs: float = DEFAULT_TIMEOUT,
        rank: int | None = None,
        world_size: int | None = None,
        endpoint: str | None = None,
        run_id: str | None = None,
        generation: int | None = None,
    ) -> None:
        self._barrier = GrpcBarrier(
            rank, world_size, PREFIX, endpoint, DEFAULT_INIT_TIMEOUT, timeout_secs, run_id, generation
        )
        self.stop = False
        self._course = Course(self._barrier.world_size, self._barrier.sequence)
        self._changed = threading.Condition()
        """Guards the course."""
        self._step: int | None = None
        """The last step; set by the main thread."""
        self._error: MusterError | None = None
        """Why there is no decision."""
        self._closed = False
        self._notices = Notices(signals, self._barrier)
        start_thread("a save point", f"muster-save-{self._barrier.rank}", self._serve)

    def __enter__(self) -> "SavePoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def deadline(self) -> float | None:
        """When the requested save must be complete, on ``time.monotonic()`` of this process.

        It has its value when :meth:`reached` returns True, and until :meth:`done` returns. It may become
        earlier meanwhile, when another notice comes. None: no save is requested, or there is no deadline.

        The clocks of ranks differ, and a rank may hear of an earlier deadline before another one. So one rank
        must decide what follows from the deadline, such as a smaller save, and broadcast its decision.
        """
        return self._course.deadline(self._barrier.save_asked)

    def reached(self, step: int) -> bool:
        """Return whether all ranks are to save now. Without a request, it only reads local memory.

        With a request, it waits until the ranks have agreed on a step, which takes a round trip.

        Args:
            step: the step that has just ended; all ranks count alike, and upwards.

        Returns:
            True once for each save, on every rank after the same step.

        Raises:
            OutcomeUnknownError: the coordinator cannot be reached, so it is unknown whether the others save.
                A call with the same step waits again.
            RefusedError: the coordinator refused this process. Each further call raises this, too.
            TypeError: the step is not a whole number.
        """
        first = self._step is None
        # Set before the check: the other thread takes this rank's bound from here.
        self._step = operator.index(step)
        if first:
            with self._changed:
                self._changed.notify_all()
        if self._course.idle and self._error is None:
            return False
        with self._changed:
            while True:
                if (error := self._error) is not None:
                    # The other thread repeats the vote. After any other error it has ended.
                    if isinstance(error, OutcomeUnknownError):
                        self._error = None
                    raise error
                following = self._course.after(step)
                if following is not Next.WAIT:
                    return following is Next.SAVE
                self._changed.wait()

    def done(self) -> None:
        """Report that this rank has saved, and wait until all have.

        Raises:
            BarrierError: a rank died, or the timeout expired. The request stays open for the next generation,
                unless it ends training.
            MusterError: :meth:`reached` has not requested a save.
            OutcomeUnknownError: the coordinator cannot be reached; call it again.
        """
        if not self._course.saves:
            raise MusterError("done() says that a save was made, and reached() has not asked for one.")
        decision = self._barrier.vote(payload=self._course.payload(self._barrier.save_asked))
        with self._changed:
            finished = self._course.finished(decision)
            self._changed.notify_all()
        if finished is not None:
            # If agents restart their workers, only the processes that get a signal end.
            self.stop = finished.stop or self._notices.signalled
        elif decision.outcome is not Outcome.RELEASED:
            raise error_for(decision)
        else:
            raise MusterError(
                "the ranks have not all saved at one step: one has restarted, or counts steps differently."
            )

    def close(self) -> None:
        """Restore the signals' handlers. Later requests fail immediately, for all ranks."""
        self._notices.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ------------------------------------------------------------------ the thread beside training

    def _serve(self) -> None:
        """Answer requests until the session ends."""
        known: SaveAsked | None = None
        try:
            asked = self._barrier.save_asked
            if self._course.stands(asked) and not self._course.wants(asked):
                self._barrier.vote(failure="it alone has restarted")
            while True:
                known = self._barrier.next_save_asked(known)
                while (asked := self._barrier.save_asked) is not None and self._course.wants(asked):
                    self._agree(asked)
        except MusterError as error:
            if not self._closed:
                self._report(error)

    def _agree(self, asked: SaveAsked) -> None:
        """Agree on one step with the others, and wait until this rank has saved there."""
        self._barrier.skip_to(asked.since)
        with self._changed:
            self._changed.wait_for(lambda: self._step is not None or self._closed)
            if not self._closed:
                left = time_left(asked, time.monotonic())
                logger.warning("a save at one step of all ranks is %s%s", asked.reason, left)
                assert self._step is not None
                self._course.promise(self._step)
                # The main thread may have passed further steps before it saw the bound.
                self._course.promise(self._step)
        if self._closed:
            self._course.agreed(self._barrier.vote(failure=OVER))
            return
        decision = self._barrier.vote_until_decided(self._report, payload=self._course.payload(asked))
        with self._changed:
            if not self._course.agreed(decision):
                logger.warning("the ranks did not agree on a step to save at: %s", decision.message)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._course.idle or self._closed)
            gone = not self._course.idle
        if gone:
            self._course.finished(self._barrier.vote(failure=OVER))

    def _report(self, error: MusterError) -> None:
        """Let the main thread raise an error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()
