"""When the ranks plan a save together: only if what one of them has to save is not what it had before.

At each save every rank says at a barrier whether it has the same to save as before. One that has begins to
write at once, and a thread says so. One that has not leaves its plan in the save's folder, waits until all
have said theirs, and then for rank 0's word that everyone's share is in the folder. No collective is held:
who is lost or does not come is named by the coordinator, and holds up nobody whose plan is the same.
"""

import logging
import os
import pickle
import sys
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from muster.worker.barriers import GrpcBarrier
from muster.worker.decision import Decision, Outcome
from muster.worker.errors import MusterError, OutcomeUnknownError, error_for
from muster.worker.pending import EarlyWarning
from muster.worker.saves.failure import failure_text
from muster.worker.saves.place import Draft
from muster.worker.saves.plans import Plans

logger = logging.getLogger(__name__)

CHANGED = b"changed"
"""What a rank hands in whose plan is another one. The usual word is empty: each rank is sent those of all."""
EARLY_WARNING = 10.0
"""Seconds after which a rank that has to wait for the others logs for whom."""


class Meeting:
    """What the ranks say of one save before they write.

    Args:
        name: of the save, for people.
        draft: of the save.
        proposed: what this rank has; None: it cannot begin.
        share: what it writes of that, if it need not be planned.
        failure: why it cannot begin.
    """

    def __init__(
        self, name: str, draft: Draft, proposed: SavePlan | None, share: SavePlan | None, failure: str | None
    ) -> None:
        self.name = name
        self.draft = draft
        self.proposed = proposed
        self.known = share
        self.failure = failure
        self._ended = threading.Condition()
        self._over = False
        self._planned: SavePlan | None = None
        self._metadata: Metadata | None = None
        self._error: Exception | None = None

    def share(self) -> SavePlan:
        """What this rank writes: known at once, if nothing has changed for it.

        Raises:
            BarrierError: not all ranks can begin the save, or rank 0 cannot plan it; the message names who.
            OutcomeUnknownError: the coordinator cannot be reached.
            MusterError: it refused this process.
            OSError: rank 0's plan cannot be read.
        """
        if self.known is not None:
            return self.known
        with self._ended:
            self._ended.wait_for(lambda: self._over or self._error is not None)
            if self._error is not None:
                raise self._error
            assert self._planned is not None
            return self._planned

    def metadata(self) -> Metadata:
        """On rank 0, when all have written: of what they have.

        Raises:
            MusterError: as :meth:`share`.
        """
        with self._ended:
            self._ended.wait_for(lambda: self._over)
            if self._error is not None:
                raise self._error
            assert self._metadata is not None
            return self._metadata

    def end(self, planned: SavePlan | None, metadata: Metadata | None) -> None:
        """All ranks have begun it."""
        with self._ended:
            self._over, self._planned, self._metadata, self._error = True, planned, metadata, None
            self._ended.notify_all()

    def fail(self, error: Exception, *, over: bool = True) -> None:
        """They have not; or, as long as it is not over, that is not known."""
        with self._ended:
            self._over, self._error = over, error
            self._ended.notify_all()


class Planning:
    """The meetings of one rank, in the order of its saves, which is the same on all ranks.

    Args:
        barrier: that decides the saves; a sibling of it is arrived at here.
        timeout: seconds that a rank is waited for.
    """

    def __init__(self, barrier: GrpcBarrier, timeout: float) -> None:
        self._owner = os.getpid()
        self._table = _Table(barrier.sibling(f"{barrier.prefix}/plan"), timeout)

    def __del__(self) -> None:
        """Nobody holds it any more. Nothing here may wait."""
        if hasattr(self, "_table") and os.getpid() == self._owner and not sys.is_finalizing():
            self._table.close()

    def begin(self, name: str, draft: Draft, proposed: SavePlan) -> Meeting:
        """Begin a save: this rank has something to write. Every save is begun or refused, once.

        Args:
            name: of the save, for people.
            draft: of the save; it has begun.
            proposed: what this rank has.

        Raises:
            RuntimeError: the system has no room for another thread.
        """
        return self._table.add(name, draft, proposed, None)

    def refuse(self, name: str, draft: Draft, failure: str) -> None:
        """Take no part in a save: all ranks that wait hear why.

        Args:
            name: of the save, for people.
            draft: of the save.
            failure: why.
        """
        self._table.add(name, draft, None, failure)

    def close(self) -> None:
        """Wait until all meetings are over."""
        thread = self._table.close()
        if thread is not None:
            thread.join()


@dataclass(frozen=True, slots=True)
class _Own:
    """This rank's plan."""

    proposed: SavePlan
    share: SavePlan


class _Table:
    """Where the meetings are held, by a thread that keeps no :class:`Planning` alive."""

    def __init__(self, barrier: GrpcBarrier, timeout: float) -> None:
        self._barrier = barrier
        self._timeout = timeout
        self._changed = threading.Condition()
        """Guards what follows."""
        self._waiting: deque[Meeting] = deque()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._own: _Own | None = None
        """None: this rank has to be planned for."""
        self._all = Plans()
        """On rank 0, and used by the thread alone."""

    def add(self, name: str, draft: Draft, proposed: SavePlan | None, failure: str | None) -> Meeting:
        with self._changed:
            own = self._own
            share = own.share if own is not None and proposed == own.proposed else None
            meeting = Meeting(name, draft, proposed, share, failure)
            if share is None and proposed is not None:
                # Until its plan is made, whatever this rank has is something else.
                self._own = None
            if self._thread is None:
                # One for all saves: a fork beside one that begins may leave its child a lock.
                thread = threading.Thread(target=self._serve, name="muster-planning", daemon=True)
                thread.start()
                self._thread = thread
            self._waiting.append(meeting)
            self._changed.notify_all()
        return meeting

    def close(self) -> threading.Thread | None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            return self._thread

    # ------------------------------------------------------------------ the thread

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                meeting = self._waiting.popleft()
            try:
                self._hold(meeting)
            except Exception as error:
                if not isinstance(error, MusterError):
                    logger.exception("%s cannot be planned", meeting.name)
                meeting.fail(error)
            del meeting

    def _hold(self, meeting: Meeting) -> None:
        failure = meeting.failure
        changes = meeting.known is None and failure is None
        if changes:
            try:
                meeting.draft.enter(self._barrier.rank)
                meeting.draft.leave(_proposed(self._barrier.rank), pickle.dumps(meeting.proposed))
            except Exception as error:
                failure = failure_text(error)
        decision = self._vote(meeting, failure, CHANGED if changes else b"")
        changed = sorted(rank for rank, word in decision.payloads.items() if word == CHANGED)
        planned = self._plan(meeting, changed) if changed else None
        meeting.end(planned, self._all.metadata)

    def _plan(self, meeting: Meeting, changed: list[int]) -> SavePlan | None:
        """Let rank 0 plan. Returns this rank's share, if it was among those who have changed."""
        rank, plans, failure = self._barrier.rank, self._all, None
        whole = len(changed) == self._barrier.world_size
        if not whole:
            # The shares are uneven, or cannot be made: let each rank be planned for at its next save.
            with self._changed:
                self._own = None
        if rank == 0:
            try:
                proposed = _take(meeting.draft, map(_proposed, changed))
                plans = plans.changed(dict(zip(changed, proposed, strict=True)), self._barrier.world_size)
                for one in changed:
                    meeting.draft.leave(_share(one), pickle.dumps(plans.shares[one]))
            except Exception as error:
                failure = failure_text(error)
        self._vote(meeting, failure)
        self._all = plans
        if rank not in changed:
            return None
        share: SavePlan = _take(meeting.draft, [_share(rank)])[0]
        assert meeting.proposed is not None
        if whole:
            with self._changed:
                self._own = _Own(meeting.proposed, share)
        return share

    def _vote(self, meeting: Meeting, failure: str | None, word: bytes = b"") -> Decision:
        """Arrive, for as long as it takes until all have.

        Raises:
            MusterError: not all have come, one has failed, or that will not be known.
        """
        early = None
        if word:
            hint = f"{meeting.name} is planned by all ranks together: each must make the same saves"
            early = EarlyWarning(EARLY_WARNING, hint)
        while True:
            try:
                decision = self._barrier.vote(failure, self._timeout, word, early)
            except OutcomeUnknownError as error:
                if self._closing:
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


def _take(draft: Draft, notes: Iterable[str]) -> list[Any]:
    return [pickle.loads(note) for note in draft.take(list(notes))]
