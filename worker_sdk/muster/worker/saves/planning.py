"""When the ranks plan a save together: only if what one of them has to save is not what it had before.

At each save every rank says at a barrier whether it has the same to save as before. One that has begins to
write at once, and a thread says so. One that has not waits until all have said theirs, leaves its plan in the
save's folder, and waits for rank 0's word that everyone's share is there, too. No collective is held: who is
lost or does not come is named by the coordinator, and holds up nobody whose plan is the same.

Nothing is left in the folder before all have begun the save: until then rank 0 may be sweeping it, as one of
another life.
"""

import logging
import os
import sys
import threading
from collections import deque
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from muster.worker.barriers import GrpcBarrier
from muster.worker.decision import Decision, Outcome
from muster.worker.errors import MusterError, OutcomeUnknownError, error_for
from muster.worker.pending import EarlyWarning
from muster.worker.saves.failure import failure_text
from muster.worker.saves.groups import Group
from muster.worker.saves.place import Draft
from muster.worker.saves.plans import Plans, packed, unpacked

logger = logging.getLogger(__name__)

CHANGED = b"changed"
"""What a rank hands in whose plan is another one. The usual word is empty: each rank is sent those of all."""
EARLY_WARNING = 10.0
"""Seconds after which a rank that has to wait for the others logs for whom."""


class SweptError(MusterError):
    """A save has failed already: its folder is gone before this rank has read what it was to write."""


class Meeting:
    """What the ranks say of one save before they write.

    Args:
        name: of the save, for people.
        draft: of the save.
        proposed: what this rank has; None: it cannot begin.
        share: what it writes of that, if it need not be planned.
        failure: why it cannot begin.
        planner: makes the plan of all ranks, on rank 0.
    """

    def __init__(
        self,
        name: str,
        draft: Draft,
        proposed: SavePlan | None,
        share: SavePlan | None,
        failure: str | None,
        planner: SavePlanner | None = None,
    ) -> None:
        self.name = name
        self.draft = draft
        self.proposed = proposed
        self.known = share
        self.failure = failure
        self.planner = planner
        self._ended = threading.Condition()
        self._over = False
        self._planned: SavePlan | None = None
        self._metadata: Metadata | None = None
        self._error: BaseException | None = None

    @property
    def unplanned(self) -> SavePlan | None:
        """What this rank has, if it is something else than before."""
        return self.proposed if self.known is None else None

    def share(self) -> SavePlan:
        """What this rank writes: known at once, if nothing has changed for it.

        Raises:
            BarrierError: not all ranks can begin the save, or rank 0 cannot plan it; the message names who.
            OutcomeUnknownError: the coordinator cannot be reached.
            SweptError: the save has failed on another rank meanwhile, which hears of that with all others.
            MusterError: the coordinator refused this process.
            OSError: rank 0's plan cannot be read.
        """
        if self.known is not None:
            return self.known
        self._wait()
        assert self._planned is not None
        return self._planned

    def metadata(self) -> Metadata:
        """On rank 0, when all have written: of what they have.

        Raises:
            MusterError: as :meth:`share`.
        """
        self._wait()
        assert self._metadata is not None
        return self._metadata

    def _wait(self) -> None:
        with self._ended:
            self._ended.wait_for(lambda: self._over or self._error is not None)
            error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # It holds the frames that it passes. If one held it, the state would live on.

    def end(self, planned: SavePlan | None, metadata: Metadata | None) -> None:
        """All ranks have begun it."""
        with self._ended:
            self._over, self._planned, self._metadata, self._error = True, planned, metadata, None
            self._ended.notify_all()

    def fail(self, error: BaseException, *, over: bool = True) -> None:
        """They have not; or, as long as it is not over, that is not known."""
        with self._ended:
            self._over, self._error = over, error
            self._ended.notify_all()


class Planning:
    """The meetings of one rank, in the order of its saves, which is the same on all ranks.

    Args:
        barrier: that decides the saves; a sibling of it is arrived at here.
        timeout: seconds that a rank is waited for.

    Raises:
        ConnectError: the coordinator could not be reached.
        RefusedError: it refused.
    """

    def __init__(self, barrier: GrpcBarrier, timeout: float) -> None:
        self._owner = os.getpid()
        self._table = _Table(barrier, timeout)
        # One for all saves: a fork beside one that begins may leave its child a lock.
        self._thread = threading.Thread(target=self._table.serve, name="muster-planning", daemon=True)
        self._thread.start()

    def __del__(self) -> None:
        """Nobody holds it any more. Nothing here may wait."""
        if hasattr(self, "_table") and os.getpid() == self._owner and not sys.is_finalizing():
            self._table.end()

    def begin(
        self, name: str, draft: Draft, proposed: SavePlan, planner: SavePlanner | None = None
    ) -> Meeting:
        """Begin a save: this rank has something to write. Every save is begun or refused.

        Args:
            name: of the save, for people.
            draft: of the save, and of no other.
            proposed: what this rank has.
            planner: makes the plan of all ranks, on rank 0; default: torch's.
        """
        return self._table.add(name, draft, proposed, planner=planner)

    def refuse(self, name: str, draft: Draft, failure: str) -> None:
        """Take no part in a save, unless it is begun: all ranks that wait hear why.

        Args:
            name: of the save, for people.
            draft: of the save.
            failure: why.
        """
        if self._table.last is not draft:
            self._table.add(name, draft, None, failure)
        else:
            self._table.wake()  # An interrupt may have kept who began it from that.

    def check_open(self) -> None:
        """Refuse a save after the last one: no thread would hold its meeting.

        Raises:
            MusterError: :meth:`end` was called.
        """
        if self._table.ending:
            raise MusterError(
                "this Checkpointer is closed, or its close() was interrupted; make another one."
            )

    def end(self) -> None:
        """No save follows. A coordinator that is away for as long as a save may take is given up."""
        self._table.end()

    def close(self) -> None:
        """Wait until all meetings are over.

        A handler of a signal that has interrupted :meth:`begin` waits for nothing: the thread waits for the
        lock that is held there, and ends when the handler has returned.
        """
        self.end()
        if not self._table.is_held_here():
            self._thread.join()


@dataclass(frozen=True, slots=True)
class _Own:
    """This rank's plan."""

    proposed: SavePlan
    share: SavePlan


class _Table:
    """Where the meetings are held, by a thread that keeps no :class:`Planning` alive."""

    def __init__(self, barrier: GrpcBarrier, timeout: float) -> None:
        self._barrier = barrier.sibling(f"{barrier.prefix}/plan")
        self._group = Group.of(barrier)
        self._timeout = timeout
        self.last: Draft | None = None
        """The draft of the save that was begun or refused last."""
        self._lock = threading.RLock()
        """Guards what follows. Entered by itself, not by way of the condition, as in the queue."""
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[Meeting] = deque()
        self.ending = False
        self._own: _Own | None = None
        """None: this rank has to be planned for."""
        self._all = Plans()
        """On rank 0, and used by the thread alone."""

    def add(
        self,
        name: str,
        draft: Draft,
        proposed: SavePlan | None,
        failure: str | None = None,
        planner: SavePlanner | None = None,
    ) -> Meeting:
        with self._lock:
            own = self._own
            share = own.share if own is not None and proposed == own.proposed else None
            meeting = Meeting(name, draft, proposed, share, failure, planner)
            if meeting.unplanned is not None:
                # Until its plan is made, whatever this rank has is something else.
                self._own = None
            # No call between these: who interrupts comes after one, and is to find both or neither.
            self.last = draft
            self._waiting.append(meeting)
            self._changed.notify_all()
        return meeting

    def is_held_here(self) -> bool:
        """Whether this thread has the lock."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]  # As threading.Condition asks.

    def wake(self) -> None:
        with self._lock:
            self._changed.notify_all()

    def end(self) -> None:
        with self._lock:
            self.ending = True
            self._changed.notify_all()

    # ------------------------------------------------------------------ the thread

    def serve(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._waiting or self.ending)
                if not self._waiting:
                    return
                meeting = self._waiting.popleft()
            try:
                self._hold(meeting)
            except OutcomeUnknownError as error:
                # Nor can a later one be held: the group's next barrier is still this one's.
                self._group.doubt(meeting.name)
                for given_up in (meeting, *self._waiting):
                    given_up.fail(error)
                return
            except BaseException as error:  # Whatever it is, the saves that follow need this thread.
                if not isinstance(error, MusterError):
                    logger.exception("%s cannot be planned", meeting.name)
                meeting.fail(error)
            del meeting

    def _hold(self, meeting: Meeting) -> None:
        decision = self._vote(meeting, meeting.failure, CHANGED if meeting.unplanned is not None else b"")
        changed = sorted(rank for rank, word in decision.payloads.items() if word == CHANGED)
        planned = self._plan(meeting, changed) if changed else None
        meeting.end(planned, self._all.metadata)

    def _plan(self, meeting: Meeting, changed: list[int]) -> SavePlan | None:
        """Let rank 0 plan. Returns this rank's share, if it was among those who have changed."""
        whole = len(changed) == self._barrier.world_size
        if not whole:
            # The shares are uneven, or cannot be made: let each rank be planned for at its next save.
            self._set_own(None)
        self._vote(meeting, self._leave(meeting))
        plans, failure = self._divide(meeting, changed) if self._barrier.rank == 0 else (self._all, None)
        self._vote(meeting, failure)
        self._all = plans
        if meeting.unplanned is None:
            return None
        try:
            share = unpacked(meeting.draft.take([_share(self._barrier.rank)])[0])
        except FileNotFoundError as error:
            raise SweptError(
                f"{meeting.name} has failed on another rank before it was planned here"
            ) from error
        if whole:
            self._set_own(_Own(meeting.unplanned, share))
        return share

    def _leave(self, meeting: Meeting) -> str | None:
        """Leave for rank 0 what this rank has, if that is something else. Returns why it cannot."""
        if meeting.unplanned is None:
            return None
        try:
            meeting.draft.enter(self._barrier.rank)
            meeting.draft.leave(_proposed(self._barrier.rank), packed(meeting.unplanned))
        except BaseException as error:
            return failure_text(error)
        return None

    def _divide(self, meeting: Meeting, changed: list[int]) -> tuple[Plans, str | None]:
        """On rank 0: plan, and leave for those who have changed their shares. Returns why it cannot, too."""
        try:
            proposed = meeting.draft.take([_proposed(rank) for rank in changed])
            plans = self._all.changed(
                dict(zip(changed, proposed, strict=True)), self._barrier.world_size, meeting.planner
            )
            for rank in changed:
                meeting.draft.leave(_share(rank), plans.shares[rank])
        except BaseException as error:  # Torch has one that is no Exception.
            return self._all, failure_text(error)
        return plans, None

    def _set_own(self, own: _Own | None) -> None:
        with self._lock:
            # A save that has begun since may be planned before this rank has heard of it.
            if all(meeting.unplanned is None for meeting in self._waiting):
                self._own = own

    def _vote(self, meeting: Meeting, failure: str | None, word: bytes = b"") -> Decision:
        """Arrive, for as long as it takes until all have.

        Raises:
            OutcomeUnknownError: the coordinator is given up.
            MusterError: not all have come, or one has failed.
        """
        early = None
        if word:
            hint = f"{meeting.name} is planned by all ranks together: each must make the same saves"
            early = EarlyWarning(EARLY_WARNING, hint)
        while True:
            try:
                decision = self._barrier.vote(failure, self._timeout, word, early)
            except OutcomeUnknownError as error:
                if self.ending:
                    raise
                meeting.fail(error, over=False)
            else:
                if decision.outcome is not Outcome.RELEASED:
                    raise error_for(decision)
                return decision


def _proposed(rank: int) -> str:
    return f"proposed-{rank}"


def _share(rank: int) -> str:
    return f"share-{rank}"
