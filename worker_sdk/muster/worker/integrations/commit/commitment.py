"""One save that all ranks make together, or none, whatever framework writes it."""

import atexit
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal, TypeAlias, get_args

from torch.distributed import DistError
from torch.distributed.checkpoint import CheckpointException

from muster.checkpoint.committed import UncommittedError
from muster.checkpoint.manifest import Manifest
from muster.worker.barriers import GrpcBarrier
from muster.worker.decision import Decision
from muster.worker.errors import MusterError, OutcomeUnknownError
from muster.worker.groups.write_report import WriteReport
from muster.worker.integrations.commit.lookup import Marker
from muster.worker.integrations.commit.protocol import PACE, Ballot, Notice, SaveProtocol, Terms
from muster.worker.integrations.commit.words import BEGINS, MAX_NAME, REUSED, order_of, step_of
from muster.worker.saves.failure import failure_text
from muster.worker.saves.limits import check_timeout
from muster.worker.saves.queue.groups import Group
from muster.worker.transport.fork_guard import start_thread

logger = logging.getLogger(__name__)

OnLost: TypeAlias = Literal["raise", "abort"]
"""What becomes of this process if a rank is lost or does not come. "raise": the framework's call raises,
unless a collective holds it up. "abort": the process is aborted, so that its launcher starts it again."""
LOOK = 1.0
"""Seconds between two looks whether a save that others wait for can still be decided."""
LAST_WORD = 15.0
"""Seconds that the end of a process may wait for the outcome of its save: a little more than the
coordinator's default session TTL, after which a dead rank is lost."""
COLLECTIVES = {"torch.distributed.distributed_c10d", "torch.distributed._functional_collectives"}
"""The modules in which torch's collectives raise."""


class ElsewhereError(UncommittedError):
    """Another rank has failed at what all were to do, and reports the reason itself."""


class Commitment:
    """Commits one save by all ranks or by none; a thread of its own votes for this rank.

    The main thread may hang in a collective of the framework, so the votes cannot wait for it. The thread
    runs a ``SaveProtocol``, which says when this rank votes and what. At each moment of the save a barrier
    waits for all ranks, so a rank that is lost or does not come is named to all others.

    Args:
        barrier: of all ranks that save. The saves of its group are made one after the other.
        timeout: seconds that a rank may take for its part, and that it is waited for at each barrier.
        on_lost: what becomes of this process if a rank is lost, or does not come in time.
        pace: seconds until the first vote of a rank that is not done.
        name: the save's, the same on all ranks, in the order in which they are made, as ``step-9`` comes
            before ``step-10``.
        parts: the number of parts of a rank's work. No rank begins a part before all have done the last one.

    Attributes:
        rank: this one's.
        number: of the save: where this rank's first barrier of it was to be.
        caller: the thread that makes it.

    Raises:
        OutcomeUnknownError: the coordinator cannot be reached, and the last save waits for it.
        ValueError: ``on_lost`` is neither, or the timeout is not a finite number above 0.
    """

    def __init__(
        self,
        barrier: GrpcBarrier,
        timeout: float,
        on_lost: OnLost = "raise",
        pace: float = PACE,
        name: str = "",
        parts: int = 1,
    ) -> None:
        check_save_settings(timeout, on_lost)
        self._owner = os.getpid()
        self.caller = threading.current_thread()
        self.rank = barrier.rank
        self._barrier = barrier
        self._on_lost = on_lost
        self._changed = threading.Condition()
        """Guards the protocol."""
        self._is_made = False
        """Whether there is a protocol. A signal handler may find this save before that, from its turn on."""
        self._attended = False
        """Whether the thread has begun."""
        self._over = threading.Event()
        """Set when the thread has nothing more to do."""
        try:
            take_turn(barrier, self)
            said = name.encode("utf-8", "backslashreplace")[-MAX_NAME:]
            word = BEGINS + (b"" if _goes_up(Group.of(barrier), said) else REUSED) + said
            self.number = barrier.sequence
            terms = Terms(
                barrier.prefix, barrier.run_id, barrier.rank, self.number, word, timeout, pace, parts
            )
            self._protocol = SaveProtocol(terms, WriteReport(step=step_of(name)), time.monotonic())
            self._is_made = True
            start_thread("a save", f"muster-commit-{barrier.rank}", self._attend)
        except BaseException:
            with self._changed:
                if self._attended:  # An interruption came after that.
                    self._protocol.give_up()
                    self._changed.notify_all()
                else:
                    self._over.set()
            raise

    # ------------------------------------------------------------------ the main thread

    def begun(self) -> int:
        """Wait until all ranks have begun this save.

        Returns:
            Its number, the same on all ranks.

        Raises:
            BarrierError: not all have come; the message names the missing ranks.
            MusterError: the others are at a later save.
            OutcomeUnknownError: the coordinator cannot be reached, so that this rank does not know.
            RefusedError: it refused this process.
        """
        save = self._protocol
        try:
            with self._changed:
                self._changed.wait_for(lambda: save.begun or save.reason)
                if save.begun is not None:
                    return save.begun.sequence
                raise self._reason()
        except MusterError:
            self.give_up()  # It may be begun yet, when the coordinator is there again.
            raise
        except BaseException as error:  # An interruption.
            self.failed(failure_text(error))
            raise

    def written(self, size: int | None = None) -> Decision:
        """Report that this rank has done a part of its work, and wait until all have.

        Args:
            size: bytes of this rank's share of the checkpoint, once they are known; for people.

        Returns:
            The decision.

        Raises:
            BarrierError: not all have written; the message names the ranks that have not, and why.
            MusterError: a rank gave the save up.
            OutcomeUnknownError: the coordinator cannot be reached, so that this rank does not know.
            RefusedError: it refused this process.
        """
        save = self._protocol
        with self._changed:
            done = save.part_done(time.monotonic(), size)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(save.agreed) >= done or save.reason is not None)
            if save.reason is not None:
                raise self._reason()
            return save.agreed[done - 1]

    def claim(self) -> None:
        """Let rank 0 begin to commit, when all have written; from here on it cannot fail for being late.

        Raises:
            MusterError: all have been told that the save has failed.
        """
        with self._changed:
            self._protocol.claim()

    def committed(self) -> None:
        """Report that rank 0 has committed the save; does not wait."""
        with self._changed:
            self._protocol.commit()
            self._changed.notify_all()

    def commit(self, commit: Callable[[Marker], None]) -> None:
        """Commit the save on rank 0, when all ranks have written.

        Args:
            commit: makes what was written a checkpoint, with this marker.

        Raises:
            MusterError: all have been told that the save has failed.
            Exception: what ``commit`` raised.
        """
        barrier, decision = self._barrier, self._protocol.agreed[-1]
        job = (barrier.run_id, barrier.generation, barrier.world_size)
        self.claim()
        commit(Marker(*job, decision.prefix, decision.sequence))
        self.committed()

    def confirmed(self) -> None:
        """When all have written: wait until rank 0 has committed the save.

        Raises:
            BarrierError: rank 0 could not commit it, or was lost before it said that it has.
            MusterError: rank 0 gave the save up.
            OutcomeUnknownError: the coordinator cannot be reached, so that this rank does not know.
        """
        save = self._protocol
        with self._changed:
            self._changed.wait_for(lambda: save.is_over or save.reason is not None)
            if save.reason is not None:
                raise self._reason()

    def ending(self, timeout: float) -> MusterError | None:
        """When this rank has failed or given up: wait until all have heard of it.

        Args:
            timeout: seconds.

        Returns:
            Why the save has failed, for all ranks alike; None if that is not known by then.
        """
        self.join(timeout)
        with self._changed:
            return self._protocol.reason

    def failed(self, reason: str) -> None:
        """Report that this rank has failed, and with it the save of all; does not wait.

        Args:
            reason: why, for all.
        """
        with self._changed:
            self._protocol.fail(reason)
            self._changed.notify_all()

    def give_up(self) -> None:
        """Report that the framework's call ended before it was done, as it does if a collective fails.

        This rank is not to blame for that; the others then hear which rank is lost. Does not wait.
        """
        if os.getpid() == self._owner:  # Else a lock may be held by a thread that is not here.
            with self._changed:
                if self._is_made:
                    self._protocol.give_up()
                    self._changed.notify_all()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the save has come to an end on all ranks.

        Args:
            timeout: seconds; None: for as long as that takes. In a forked child it is over.
        """
        if os.getpid() == self._owner:
            self._over.wait(timeout)

    @property
    def is_over(self) -> bool:
        """Whether the save has come to an end on all ranks."""
        return self._over.is_set()

    def check_reached(self) -> None:
        """Check that the coordinator can still be asked how the save ends.

        Raises:
            OutcomeUnknownError: it cannot be reached.
        """
        with self._changed:
            error = self._protocol.error if self._is_made else None
            if isinstance(error, OutcomeUnknownError) and not self.is_over:
                raise error

    def _reason(self) -> MusterError:
        reason = self._protocol.reason
        assert reason is not None
        return reason

    # ------------------------------------------------------------------ the thread

    def _attend(self) -> None:
        with self._changed:
            if self.is_over:
                return
            self._attended = True
        try:
            while (ballot := self._next_vote()) is not None:
                self._vote(ballot)
        except MusterError as error:
            self._break_off(error)
        except Exception as error:  # Whatever it is, the main thread waits for this one.
            logger.exception("save %d", self.number)
            self._break_off(MusterError(f"save {self.number} cannot be decided: {error!r}"))
        finally:
            self._over.set()

    def _next_vote(self) -> Ballot | None:
        """Wait until this rank has something to say; return None if the save is over."""
        save = self._protocol
        with self._changed:
            while not save.is_over:
                now = time.monotonic()
                if (ballot := save.next_vote(now)) is not None:
                    return ballot
                self._changed.wait(save.speaks_at - now)
        return None

    def _vote(self, ballot: Ballot) -> None:
        decision = self._barrier.vote_until_decided(
            self._not_heard, ballot.failure, ballot.timeout, ballot.word, report=ballot.report
        )
        with self._changed:
            notice = self._protocol.heard(decision, time.monotonic())
            self._changed.notify_all()
        if notice is not None:
            self._tell(notice)

    def _not_heard(self, error: OutcomeUnknownError) -> None:
        logger.warning("save %d: %s", self.number, error)
        with self._changed:
            self._protocol.not_heard(error)
            self._changed.notify_all()

    def _break_off(self, error: MusterError) -> None:
        with self._changed:
            notice = self._protocol.break_off(error)
            self._changed.notify_all()
        self._tell(notice)

    def _tell(self, notice: Notice) -> None:
        """Tell people: the main thread may hang."""
        logger.log(notice.level, "%s", notice.text)
        if notice.rank_lost and self._on_lost == "abort":
            logger.critical("process %d is aborted: its collectives may wait for ever", os.getpid())
            os.abort()


def commit_written(
    commitment: Commitment,
    digest: Callable[[], int],
    manifest: Callable[[], Manifest],
    commit: Callable[[Marker, Manifest], None],
    *,
    same_error: bool = False,
) -> None:
    """Commit a save in two parts, when this rank has written: all digest it, then rank 0 commits it.

    Args:
        commitment: the save's.
        digest: syncs and digests this rank's share, when all have written. Returns its bytes.
        manifest: gathers the digests on rank 0, when all have digested.
        commit: makes what was written a checkpoint, on rank 0.
        same_error: as in :func:`report_failure`.

    Raises:
        BarrierError: not all have written, or rank 0 could not commit; the message names the rank, and why.
        MusterError: a rank gave the save up.
        OutcomeUnknownError: the coordinator cannot be reached.
    """
    commitment.written()
    with report_failure(commitment, same_error=same_error):
        size = digest()
    commitment.written(size)
    if commitment.rank == 0:
        with report_failure(commitment, same_error=same_error):
            made = manifest()
            commitment.commit(lambda marker: commit(marker, made))
    commitment.confirmed()


def check_save_settings(timeout: float, on_lost: OnLost, barrier: GrpcBarrier | None = None) -> None:
    """Check what users give an adapter for its saves.

    Args:
        timeout: seconds that a rank may take.
        on_lost: what becomes of this process if a rank is lost.
        barrier: the barrier of all ranks of the job, if one was given.

    Raises:
        ValueError: the timeout is not a finite number above 0, ``on_lost`` is neither of its values, or the
            barrier does not cover all ranks.
    """
    check_timeout(timeout)
    if on_lost not in get_args(OnLost):
        raise ValueError(f'on_lost = {on_lost!r}: it must be "raise" or "abort".')
    if barrier is not None and barrier.participants:
        raise ValueError(
            f"the barrier has only ranks {list(barrier.participants)}, and all ranks of the job write a "
            "checkpoint. Give a barrier without participants."
        )


@contextmanager
def report_failure(
    commitment: Commitment, leave: Callable[[], None] | None = None, *, same_error: bool = False
) -> Iterator[None]:
    """What is raised here is this rank's failure, and everyone's; or a collective's, and then another's.

    Args:
        commitment: the save's.
        leave: called if this rank has failed itself, and is to get the error of all: ends the collectives in
            which the others wait for it.
        same_error: whether a rank that has failed itself gets the error of all, too; default: its own error.

    Raises:
        MusterError: why the save has failed, the same on all ranks, if the coordinator says so within
            ``LAST_WORD``. This rank has failed itself and ``same_error`` is set, or a collective failed.
    """
    try:
        yield
    except BaseException as error:
        if is_own(error, commitment.rank):
            commitment.failed(failure_text(error))
            if not same_error or not isinstance(error, Exception):  # An interruption does not wait.
                raise
            if leave is not None:
                with suppress(RuntimeError):  # The others may be gone.
                    leave()
        else:
            commitment.give_up()
        if (reason := commitment.ending(LAST_WORD)) is not None:
            raise reason from error
        raise


def is_own(error: BaseException, rank: int) -> bool:
    """Whether a rank that raises is to blame itself, as far as can be told."""
    if isinstance(error, CheckpointException):
        return rank in error.failures
    if isinstance(error, (ElsewhereError, DistError)):
        return False
    frames = [frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)]
    of_a_collective = COLLECTIVES.intersection(frames[-3:]) or "gloo" in str(error)
    return not (isinstance(error, RuntimeError) and of_a_collective)


_last: dict[Group, Commitment] = {}
"""By group, the save that was begun last."""
_highest: dict[Group, bytes] = {}
"""By group, of the names of its saves the one that comes after the others."""
_last_lock = threading.Lock()


def take_turn(barrier: GrpcBarrier, following: Commitment | None = None) -> None:
    """Wait until the last save of a barrier's group is over, which another thread may be in the midst of.

    An arrival meanwhile would take that save's turn, and the ranks would be out of step.

    Args:
        barrier: the group's.
        following: the save for which the next ones have to wait.

    Raises:
        OutcomeUnknownError: the coordinator cannot be reached, and that save waits for it.
    """
    group = Group.of(barrier)
    while True:
        with _last_lock:
            last = _last.get(group)
            if last is None or last.is_over:
                # Not before: after an interrupt here the next save must not begin beside the last.
                if following is not None:
                    _last[group] = following
                return
        if last.caller is threading.current_thread() or not last.caller.is_alive():
            last.give_up()  # The framework has raised out of it, without a word.
        last.join(LOOK)
        last.check_reached()


def _goes_up(group: Group, name: bytes) -> bool:
    """Return whether a save comes after all that were begun before, as far as names tell; it is begun now."""
    with _last_lock:
        highest = _highest.get(group, b"")
        if order_of(name) <= order_of(highest):
            return False
        _highest[group] = name
        return True


def _hear_the_end() -> None:
    """At the end of the process, which a collective that failed may have brought: hear who is lost."""
    with _last_lock:
        last_ones = list(_last.values())
    deadline = time.monotonic() + LAST_WORD
    for last in last_ones:
        last.give_up()
        last.join(max(0.0, deadline - time.monotonic()))


def _reset_in_child() -> None:
    """In a forked child, which makes none of its parent's saves."""
    global _last_lock
    _last_lock = threading.Lock()
    _last.clear()


atexit.register(_hear_the_end)
os.register_at_fork(after_in_child=_reset_in_child)
