"""The ranks plan a save together only if the plan of one of them has changed since the last save.

At each save, every rank votes at a barrier whether its plan is unchanged. A rank with an unchanged plan
starts writing immediately. A rank with a changed plan waits for all votes, stores its plan in the save's
folder, and waits for rank 0. No collective is held. The coordinator names a rank that is lost or does not
come. Ranks with an unchanged plan do not wait for it.

No rank stores anything in the folder before all have begun the save: until then rank 0 may be sweeping it, as
a folder of another life.
"""

import logging
import os
import sys
import threading
from dataclasses import dataclass
from queue import SimpleQueue

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from muster.worker.barriers import GrpcBarrier
from muster.worker.decision import Decision, Outcome
from muster.worker.errors import MusterError, OutcomeUnknownError, error_for
from muster.worker.groups.pending import EarlyWarning
from muster.worker.saves.failure import failure_text
from muster.worker.saves.planning.plans import Plans, packed, unpacked
from muster.worker.saves.queue.groups import Group
from muster.worker.saves.storage.checkpoint_storage import PendingSave

logger = logging.getLogger(__name__)

CHANGED = b"changed"
"""What a rank hands in whose plan is another one. The usual word is empty: each rank is sent those of all."""
CLOSED = "this Checkpointer is closed, or its close() was interrupted; make another one."
EARLY_WARNING = 10.0
"""Seconds after which a waiting rank logs which ranks it waits for."""


class SweptError(MusterError):
    """A save has failed already: its folder is gone before this rank has read what it was to write."""


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What all ranks have agreed on."""

    share: SavePlan | None
    """What this rank writes; None if it knew that already."""
    metadata: Metadata | None
    """On rank 0: of what all write."""


class PlanNegotiation:
    """What the ranks say of one save before they write.

    The thread that negotiates tells the one that waits by one ``SimpleQueue.put``. So a signal handler that
    interrupts the one that waits cannot hold up the other, whatever it waits for.

    Args:
        name: of the save, for people.
        pending: the checkpoint that the save writes.
        number: its place among those of this rank.
        proposed: what this rank has; None: it cannot begin.
        share: what it writes of that, if it need not be planned.
        failure: why it cannot begin.
        planner: makes the plan of all ranks, on rank 0.
    """

    def __init__(
        self,
        name: str,
        pending: PendingSave,
        number: int,
        proposed: SavePlan | None,
        share: SavePlan | None,
        failure: str | None,
        planner: SavePlanner | None = None,
    ) -> None:
        self.name = name
        self.pending = pending
        self.number = number
        self.proposed = proposed
        self.known = share
        self.failure = failure
        self.planner = planner
        self.over = False
        """Whether it has come to an end, on this rank."""
        self._agreed: _Agreed | None = None
        self._news: SimpleQueue[BaseException | None] = SimpleQueue()
        """Why it has failed, or is not decided yet; None: :attr:`_agreed` is set."""

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
            MusterError: the coordinator refused this process, or the Checkpointer is closed.
            OSError: rank 0's plan cannot be read.
        """
        if self.known is not None:
            return self.known
        share = self._wait().share
        assert share is not None
        return share

    def metadata(self) -> Metadata:
        """Return the metadata of the whole save (rank 0 only, after all ranks wrote).

        Raises:
            MusterError: as :meth:`share`.
        """
        metadata = self._wait().metadata
        assert metadata is not None
        return metadata

    def _wait(self) -> _Agreed:
        while (agreed := self._agreed) is None:
            error = self._news.get()
            try:
                if error is not None:
                    raise error
            finally:
                del error  # It holds the frames that it passes. If one held it, the state would live on.
        return agreed

    def end(self, share: SavePlan | None, metadata: Metadata | None) -> None:
        """All ranks have begun it."""
        self._agreed = _Agreed(share, metadata)
        self.over = True
        self._news.put(None)

    def fail(self, error: BaseException) -> None:
        """Fail the negotiation; one waiting call raises ``error``."""
        self.over = True
        self._news.put(error)

    def doubt(self, error: BaseException) -> None:
        """Note that the outcome is not known yet; one waiting call raises ``error``."""
        self._news.put(error)


class Planning:
    """The negotiations of one rank, in the order of its saves, which is the same on all ranks.

    Args:
        barrier: that decides the saves; a sibling of it is arrived at here.
        timeout: seconds that a rank is waited for.

    Raises:
        ConnectError: the coordinator could not be reached.
        RefusedError: it refused.
    """

    def __init__(self, barrier: GrpcBarrier, timeout: float) -> None:
        self._owner = os.getpid()
        self._begun = 0
        """How many negotiations were begun; changed by the thread that saves alone."""
        self._replanned = 0
        """The number of the last one for which this rank has to be planned for."""
        self._negotiator = _Negotiator(barrier, timeout)
        # One for all saves: a fork beside one that begins may leave its child a lock.
        self._thread = threading.Thread(target=self._negotiator.serve, name="muster-planning", daemon=True)
        self._thread.start()

    def __del__(self) -> None:
        """Nobody holds it any more. Nothing here may wait."""
        if hasattr(self, "_negotiator") and os.getpid() == self._owner and not sys.is_finalizing():
            self._negotiator.end()

    def begin(
        self, name: str, pending: PendingSave, proposed: SavePlan, planner: SavePlanner | None = None
    ) -> PlanNegotiation:
        """Begin a save: this rank has something to write. Every save is begun or refused.

        Args:
            name: of the save, for people.
            pending: the checkpoint that the save writes, and of no other.
            proposed: what this rank has.
            planner: makes the plan of all ranks, on rank 0; default: torch's.
        """
        self._begun += 1
        number = self._begun
        own = self._negotiator.own
        # A plan that was asked for before this rank had something else is not that of what it has now.
        known = own is not None and own.number >= self._replanned and proposed == own.proposed
        share = own.share if own is not None and known else None
        if share is None:
            self._replanned = number
        negotiation = PlanNegotiation(name, pending, number, proposed, share, None, planner)
        # An interrupt finds the save either begun or not.
        self._negotiator.put(negotiation)
        return negotiation

    def refuse(self, name: str, pending: PendingSave, failure: str) -> None:
        """Take no part in a save, unless it is begun: all ranks that wait hear why.

        Args:
            name: of the save, for people.
            pending: the checkpoint that the save writes.
            failure: why.
        """
        self._negotiator.put(PlanNegotiation(name, pending, self._begun, None, None, failure))

    def check_open(self) -> None:
        """Refuse a save after the last one: no thread would negotiate it.

        Raises:
            MusterError: :meth:`end` was called.
        """
        if self._negotiator.ending:
            raise MusterError(CLOSED)

    def end(self) -> None:
        """No save follows. A coordinator that is away for as long as a save may take is given up."""
        self._negotiator.end()

    def close(self) -> None:
        """Wait until all negotiations are over."""
        self.end()
        self._thread.join()


@dataclass(frozen=True, slots=True)
class _Own:
    """This rank's plan."""

    number: int
    """The number of the negotiation that made it."""
    proposed: SavePlan
    share: SavePlan


class _Negotiator:
    """Negotiates, on a thread that keeps no :class:`Planning` alive.

    A save is handed to it by one ``SimpleQueue.put``, which no signal can interrupt half-way.
    """

    def __init__(self, barrier: GrpcBarrier, timeout: float) -> None:
        self._barrier = barrier.sibling(f"{barrier.prefix}/plan")
        self._group = Group.of(barrier)
        self._timeout = timeout
        self._inbox: SimpleQueue[PlanNegotiation | None] = SimpleQueue()
        """The saves, in order; None: no save follows."""
        self.ending = False
        self._ended = False
        """Whether the thread takes nothing more from the inbox."""
        self.own: _Own | None = None
        """Replaced by the thread alone. None: this rank has to be planned for."""
        self._all = Plans()
        """On rank 0, and used by the thread alone."""
        self._last: PendingSave | None = None
        """The pending checkpoint of the save that was negotiated last; used by the thread alone."""

    def put(self, negotiation: PlanNegotiation) -> None:
        self._inbox.put(negotiation)
        if self._ended:  # The thread may not have seen it.
            negotiation.fail(MusterError(CLOSED))

    def end(self) -> None:
        self.ending = True
        self._inbox.put(None)

    # ------------------------------------------------------------------ the thread

    def serve(self) -> None:
        error: MusterError | None = None
        while error is None and (negotiation := self._inbox.get()) is not None:
            if negotiation.pending is self._last:
                continue  # It is refused, and was begun: an interrupt kept its caller from knowing that.
            self._last = negotiation.pending
            error = self._negotiate(negotiation)
            del negotiation
        self._ended = True
        while not self._inbox.empty():
            left = self._inbox.get()
            if left is not None:
                left.fail(error or MusterError(CLOSED))

    def _negotiate(self, negotiation: PlanNegotiation) -> MusterError | None:
        """Negotiate. Returns why no later save can be negotiated, either."""
        try:
            self._agree(negotiation)
        except OutcomeUnknownError as error:
            # The group's next barrier is still this one's.
            self._group.retire(negotiation.name)
            negotiation.fail(error)
            return error
        except BaseException as error:  # Whatever it is, the saves that follow need this thread.
            if not isinstance(error, MusterError):
                logger.exception("%s cannot be planned", negotiation.name)
            negotiation.fail(error)
        return None

    def _agree(self, negotiation: PlanNegotiation) -> None:
        decision = self._vote(
            negotiation, negotiation.failure, CHANGED if negotiation.unplanned is not None else b""
        )
        changed = sorted(rank for rank, word in decision.payloads.items() if word == CHANGED)
        planned = self._plan(negotiation, changed) if changed else None
        negotiation.end(planned, self._all.metadata)

    def _plan(self, negotiation: PlanNegotiation, changed: list[int]) -> SavePlan | None:
        """Let rank 0 plan. Returns this rank's share, if it was among those who have changed."""
        whole = len(changed) == self._barrier.world_size
        if not whole:
            # The shares are uneven, or cannot be made: let each rank be planned for at its next save.
            self.own = None
        self._vote(negotiation, self._leave(negotiation))
        plans, failure = self._divide(negotiation, changed) if self._barrier.rank == 0 else (self._all, None)
        self._vote(negotiation, failure)
        self._all = plans
        if negotiation.unplanned is None:
            return None
        try:
            share = unpacked(negotiation.pending.take([_share(self._barrier.rank)])[0])
        except FileNotFoundError as error:
            raise SweptError(
                f"{negotiation.name} has failed on another rank before it was planned here"
            ) from error
        if whole:
            self.own = _Own(negotiation.number, negotiation.unplanned, share)
        return share

    def _leave(self, negotiation: PlanNegotiation) -> str | None:
        """Leave for rank 0 what this rank has, if that is something else. Returns why it cannot."""
        if negotiation.unplanned is None:
            return None
        try:
            negotiation.pending.enter(self._barrier.rank)
            negotiation.pending.leave(_proposed(self._barrier.rank), packed(negotiation.unplanned))
        except BaseException as error:
            return failure_text(error)
        return None

    def _divide(self, negotiation: PlanNegotiation, changed: list[int]) -> tuple[Plans, str | None]:
        """On rank 0: plan, and leave for those who have changed their shares. Returns why it cannot, too."""
        try:
            proposed = negotiation.pending.take([_proposed(rank) for rank in changed])
            plans = self._all.changed(
                dict(zip(changed, proposed, strict=True)), self._barrier.world_size, negotiation.planner
            )
            for rank in changed:
                negotiation.pending.leave(_share(rank), plans.shares[rank])
        except BaseException as error:  # Torch has one that is no Exception.
            return self._all, failure_text(error)
        return plans, None

    def _vote(self, negotiation: PlanNegotiation, failure: str | None, word: bytes = b"") -> Decision:
        """Arrive, for as long as it takes until all have.

        Raises:
            OutcomeUnknownError: the coordinator is given up.
            MusterError: not all have come, or one has failed.
        """
        early = None
        if word:
            hint = f"{negotiation.name} is planned by all ranks together: each must make the same saves"
            early = EarlyWarning(EARLY_WARNING, hint)

        def doubt(error: OutcomeUnknownError) -> None:
            if self.ending:
                raise error
            negotiation.doubt(error)

        decision = self._barrier.vote_until_decided(doubt, failure, self._timeout, word, early)
        if decision.outcome is not Outcome.RELEASED:
            raise error_for(decision)
        return decision


def _proposed(rank: int) -> str:
    return f"proposed-{rank}"


def _share(rank: int) -> str:
    return f"share-{rank}"
