"""The place in a training loop where all ranks save at one step, when that is asked for."""

import logging
import operator
import signal
import threading
from collections.abc import Iterable
from types import TracebackType

from muster.worker.barriers import DEFAULT_INIT_TIMEOUT, GrpcBarrier
from muster.worker.decision import Outcome
from muster.worker.errors import MusterError, OutcomeUnknownError, error_for
from muster.worker.savepoint.agreement import PREFIX, Course, Next
from muster.worker.savepoint.notices import Notices
from muster.worker.session.save_request import SaveAsked
from muster.worker.transport.fork_guard import start_thread

logger = logging.getLogger(__name__)

OVER = "its training is over"
"""Why a rank that takes no more part fails what it is asked for."""
DEFAULT_TIMEOUT = 600.0
"""Seconds; a step may take long, and a rank hears of a request only between two."""


class SavePoint:
    """All ranks save, and stop if so asked, at one agreed step, or none does.

    It is asked for by ``muster save``, by ``RunService.RequestSave``, or by a signal to any rank::

        point = SavePoint(signals=[signal.SIGTERM])
        for step in range(start, steps):
            train(step)
            if point.reached(step):
                checkpointer.save(step, state)
                checkpointer.finalize(blocking=True)
                point.done()
                if point.stop:
                    break

    Every rank makes one, and calls :meth:`reached` after the same steps. If a rank dies, or cannot be waited
    for any longer, nobody saves, and the request stands for the next life of the job.

    Args:
        signals: to this process, that ask for a save of all ranks after which training ends. Only the main
            thread may name any. Their own handlers are still called.
        timeout_secs: seconds that a rank waits for the others, counted by the coordinator from the first one.
        rank: this process's; default: ``RANK``.
        world_size: the number of ranks; default: ``WORLD_SIZE``.
        endpoint: the coordinator's; default: ``MUSTER_ENDPOINT``.
        run_id: the training job; default as in :class:`~muster.worker.GrpcBarrier`.
        generation: the job's life; default as in :class:`~muster.worker.GrpcBarrier`.

    Attributes:
        stop: whether training is to end after the save that was made last.

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
        """The last one that was made; the main thread's."""
        self._error: MusterError | None = None
        """Why the ranks could not be heard."""
        self._closed = False
        self._notices = Notices(signals, self._barrier)
        start_thread("a save point", f"muster-save-{self._barrier.rank}", self._attend)

    def __enter__(self) -> "SavePoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def reached(self, step: int) -> bool:
        """Whether all ranks are to save now; looks at local memory alone while nothing is asked for.

        When something is, it waits for the other ranks, but not before this one is two steps further.

        Args:
            step: the one that was just made; all ranks count alike, and upwards.

        Returns:
            True once for each save, on every rank after the same step.

        Raises:
            OutcomeUnknownError: the coordinator cannot be reached; whether the others save is unknown. Called
                again with the same step, it waits again.
            RefusedError: it refused this process, now and at each further call.
            TypeError: the step is no whole number.
        """
        first = self._step is None
        # Noted before the look: who asks for this rank's bound takes it from here.
        self._step = operator.index(step)
        if first:
            with self._changed:
                self._changed.notify_all()
        if self._course.idle and self._error is None:
            return False
        with self._changed:
            while True:
                if (error := self._error) is not None:
                    # That barrier is asked for again; after any other error nothing more is heard.
                    if isinstance(error, OutcomeUnknownError):
                        self._error = None
                    raise error
                following = self._course.after(step)
                if following is not Next.WAIT:
                    return following is Next.SAVE
                self._changed.wait()

    def done(self) -> None:
        """Say that this rank has saved, and wait until all have.

        Raises:
            BarrierError: a rank died, or could not be waited for; the request stands for the next life of
                the job.
            MusterError: :meth:`reached` has not said that it is time.
            OutcomeUnknownError: the coordinator cannot be reached; call it again.
        """
        if not self._course.saves:
            raise MusterError("done() says that a save was made, and reached() has not asked for one.")
        decision = self._barrier.vote(payload=self._course.word(self._barrier.save_asked))
        with self._changed:
            finished = self._course.finished(decision)
            self._changed.notify_all()
        if finished is not None:
            self.stop = finished.stop
        elif decision.outcome is not Outcome.RELEASED:
            raise error_for(decision)
        else:
            raise MusterError(
                "the ranks have not all saved at one step: one began anew, or counts otherwise."
            )

    def close(self) -> None:
        """Take no more part: signals are given back, and saves that are asked for fail at once, for all."""
        self._notices.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ------------------------------------------------------------------ aside, while training goes on

    def _attend(self) -> None:
        """Answer whatever is asked for, until the session ends."""
        known: SaveAsked | None = None
        try:
            asked = self._barrier.save_asked
            if self._course.stands(asked) and not self._course.wants(asked):
                self._barrier.vote(failure="it has begun anew, alone")
            while True:
                known = self._barrier.next_save_asked(known)
                while (asked := self._barrier.save_asked) is not None and self._course.wants(asked):
                    self._agree(asked)
        except MusterError as error:
            if not self._closed:
                self._tell(error)

    def _agree(self, asked: SaveAsked) -> None:
        """Come to one step with the others, and wait until this rank has saved there."""
        self._barrier.skip_to(asked.since)
        with self._changed:
            self._changed.wait_for(lambda: self._step is not None or self._closed)
            if not self._closed:
                logger.warning("a save at one step of all ranks is %s", asked.reason)
                assert self._step is not None
                self._course.promise(self._step)
                # The main thread may have come further before it saw the promise.
                self._course.promise(self._step)
        if self._closed:
            self._course.heard(self._barrier.vote(failure=OVER))
            return
        decision = self._barrier.vote_until_decided(self._tell, payload=self._course.word(asked))
        with self._changed:
            if not self._course.heard(decision):
                logger.warning("the ranks did not agree on a step to save at: %s", decision.message)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._course.idle or self._closed)
            gone = not self._course.idle
        if gone:
            self._course.finished(self._barrier.vote(failure=OVER))

    def _tell(self, error: MusterError) -> None:
        """Have the main thread raise it."""
        with self._changed:
            self._error = error
            self._changed.notify_all()
