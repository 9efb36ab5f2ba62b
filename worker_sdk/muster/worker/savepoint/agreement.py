"""How ranks agree on one step, by their payloads at two barriers in a row.

All ranks get the same decisions in the same order, and nothing else counts here, so all come to the same
result. At the first barrier each rank names its bound: the step that it will not pass before the decision.
All save at the greatest bound, which no rank can have passed. At the second barrier each rank says that it
has saved.
"""

import enum
from dataclasses import dataclass

from muster.client.save_votes import Phase, SaveVote, votes_of_all
from muster.worker.decision import Decision, Outcome
from muster.worker.session.save_request import SaveAsked

AHEAD = 1
"""Steps that a rank continues before it waits for the decision: the one that it is in when it hears of the
request. No two ranks wait for each other, because a rank votes in a thread of its own once its first step has
ended. If each step waits for a collective, no rank is more than one step ahead of another, and the agreed
step is two steps away at most. If hosts run further ahead of their GPUs, the agreed step is later."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """The combined votes of all ranks."""

    step: int
    number: int
    stop: bool


def combine(decision: Decision, phase: Phase, world_size: int) -> Agreed | None:
    """Combine the ranks' votes at a barrier.

    Returns:
        None if the barrier failed, a rank was at the other phase, or they have saved at different steps.
    """
    if decision.outcome is not Outcome.RELEASED:
        return None
    votes = votes_of_all(decision.payloads.values(), world_size)
    if not votes or votes[0].phase is not phase:
        return None
    return Agreed(
        max(one.step for one in votes),
        max(one.number for one in votes),
        any(one.stop for one in votes),
    )


class Next(enum.Enum):
    """What a rank does after a step."""

    GO_ON = enum.auto()
    WAIT = enum.auto()
    """Wait for the decision."""
    SAVE = enum.auto()


class Course:
    """One rank's progress from a request to the save of all ranks.

    Args:
        world_size: the number of ranks.
        position: the rank's next barrier in the group. Older requests are not this process's.
    """

    def __init__(self, world_size: int, position: int) -> None:
        self._world_size = world_size
        self._done = 0
        """The newest request for which all ranks have saved."""
        self._failed_at = position - 1
        """The newest barrier that failed. Older requests are left to the job's next life."""
        self._bound: int | None = None
        """The step that this rank does not pass; None: it has named none."""
        self._agreed: Agreed | None = None
        self._saved_at: int | None = None
        """The step of a save that is not done."""

    def wants(self, asked: SaveAsked | None) -> bool:
        """Return whether the ranks have to agree on a step for a request."""
        return self.stands(asked) and asked is not None and asked.since > self._failed_at

    def stands(self, asked: SaveAsked | None) -> bool:
        """Return whether a request is open, be it this process's or not."""
        return asked is not None and not asked.withdrawn and asked.number > self._done

    def deadline(self, asked: SaveAsked | None) -> float | None:
        """Return when the save of an open request must be complete; None: there is no deadline.

        Args:
            asked: the newest request that this rank knows.
        """
        return asked.deadline if asked is not None and self.stands(asked) else None

    @property
    def idle(self) -> bool:
        """Whether no other rank waits for this one, and it has nothing to do."""
        return self._bound is None and self._agreed is None

    @property
    def saves(self) -> bool:
        """Whether this rank has reached the agreed step, and the save is not done."""
        return self._saved_at is not None

    def promise(self, step: int) -> None:
        """Let this rank end ``AHEAD`` further steps, and no more, before the decision."""
        bound = step + AHEAD
        self._bound = bound if self._bound is None else max(self._bound, bound)

    def after(self, step: int) -> Next:
        """Return what to do after a step."""
        if self._agreed is not None:
            if self.saves or step < self._agreed.step:
                return Next.GO_ON
            self._saved_at = step
            return Next.SAVE
        return Next.WAIT if self._bound is not None and step >= self._bound else Next.GO_ON

    def payload(self, asked: SaveAsked | None) -> bytes:
        """Return the payload for the next barrier.

        Args:
            asked: the newest request that this rank knows.
        """
        if self._agreed is not None:
            assert self._saved_at is not None
            phase, step, number, stop = Phase.DONE, self._saved_at, self._agreed.number, self._agreed.stop
        else:
            assert self._bound is not None
            phase, step, number, stop = Phase.AGREE, self._bound, 0, False
        if asked is not None and not asked.withdrawn:
            number, stop = max(number, asked.number), stop or asked.stop
        return SaveVote(phase, step, number, stop).encode()

    def agreed(self, decision: Decision) -> bool:
        """Apply the decision on a step; False: the ranks have not agreed on one."""
        self._agreed = combine(decision, Phase.AGREE, self._world_size)
        self._bound = None
        if self._agreed is None:
            self._failed_at = decision.sequence
        return self._agreed is not None

    def finished(self, decision: Decision) -> Agreed | None:
        """Apply the decision on whether all have saved; None: not all have, or at different steps."""
        finished = combine(decision, Phase.DONE, self._world_size)
        self._agreed = self._saved_at = None
        if finished is None:
            self._failed_at = decision.sequence
        else:
            self._done = finished.number
        return finished
