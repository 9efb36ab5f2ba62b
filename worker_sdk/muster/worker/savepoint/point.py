"""The place in a training loop where all ranks save at one step, when that is asked for."""

import logging
import signal
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType

from muster.worker.barriers import DEFAULT_INIT_TIMEOUT, GrpcBarrier
from muster.worker.decision import Decision, Outcome
from muster.worker.errors import MusterError, error_for
from muster.worker.fork_guard import start_thread
from muster.worker.savepoint.agreement import PREFIX, Course, Next
from muster.worker.savepoint.asked import SaveAsked
from muster.worker.savepoint.notices import Notices

logger = logging.getLogger(__name__)

GOODBYE_TIMEOUT = 10.0
"""Seconds that a rank which takes no more part tries to say so."""
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
        self._course = Course(self._barrier.world_size)
        self._answer: Future[Decision] | None = None
        """Of the barrier at which the ranks agree."""
        self._quiet: SaveAsked | None = None
        """What was asked for last, if nothing is to be done about it."""
        self._notices = Notices(signals, self._barrier.config)

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
            OutcomeUnknownError: the coordinator cannot be reached; whether the others save is unknown.
            RefusedError: it refused this process.
        """
        asked = self._barrier.save_asked
        if asked is self._quiet:
            return False
        if self._answer is not None and self._answer.done():
            self._hear(self._answer)
        following = self._course.after(step, asked)
        if following is Next.WAIT:
            # Without an answer under way, the last one broke off: the same word again is always safe.
            self._hear(self._answer or self._arrive(self._course.word(asked)))
            following = self._course.after(step, asked)
        if following is Next.ARRIVE:
            assert asked is not None
            logger.warning("a save at one step of all ranks is %s", asked.reason)
            self._answer = self._arrive(self._course.word(asked))
        elif self._course.idle and not self._course.wants(asked):
            self._quiet = asked
        return following is Next.SAVE

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
        finished = self._course.finished(decision)
        if finished is not None:
            self.stop = finished.stop
        elif decision.outcome is not Outcome.RELEASED:
            raise error_for(decision)
        else:
            raise MusterError("not all ranks were at the end of a save: one has begun anew meanwhile.")

    def close(self) -> None:
        """Take no more part: signals are given back, and a save that is asked for now fails at once."""
        self._notices.close()
        if self._course.idle and self._course.wants(self._barrier.save_asked):
            with suppress(MusterError):
                self._barrier.vote(failure="its training is over", timeout_secs=GOODBYE_TIMEOUT)

    def _arrive(self, word: bytes) -> "Future[Decision]":
        """Hand in a word aside, while training goes on."""
        future: Future[Decision] = Future()

        def vote() -> None:
            try:
                future.set_result(self._barrier.vote(payload=word))
            except BaseException as error:
                future.set_exception(error)

        start_thread("a save point", f"muster-save-{self._barrier.rank}", vote)
        return future

    def _hear(self, answer: "Future[Decision]") -> None:
        self._answer = None
        decision = answer.result()
        if not self._course.heard(decision):
            logger.warning("the ranks did not agree on a step to save at: %s", decision.message)
