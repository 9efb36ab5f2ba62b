"""How ranks agree on one step, from what all of them hand in at two barriers in a row.

Every rank hears the same decisions in the same order, and what follows from them follows here, from nothing
else: so all come to the same. At the first barrier each says beyond which step it will not go before it has
heard; they save at the greatest of those, which nobody can have passed. At the second each says that it has.
"""

import enum
from dataclasses import dataclass
from typing import NamedTuple

from muster.worker.decision import Decision, Outcome
from muster.worker.session.save_request import SaveAsked

PREFIX = "muster/save"
"""The group of both barriers; the coordinator knows it, too."""


AHEAD = 2
"""Steps that a rank goes on before it waits for the others. Where every step has a collective, no rank is
more than one step ahead of another, so that with one nobody waits for a rank that waits for it; with the
second the agreement is mostly there when it is needed."""


class Phase(enum.StrEnum):
    """What a barrier of the group is about."""

    AGREE = "agree"
    DONE = "done"


class Word(NamedTuple):
    """What one rank hands in."""

    phase: Phase
    step: int
    """Beyond which it will not go, or at which it has saved."""
    number: int
    """Of the newest request that it has heard of."""
    stop: bool
    """Whether that one wants training to end."""

    def encode(self) -> bytes:
        """As a payload: ``PHASE STEP NUMBER STOP``, in ASCII."""
        return f"{self.phase} {self.step} {self.number} {self.stop:d}".encode("ascii")


def parse(payload: bytes) -> Word | None:
    """What a rank handed in; None if it is no such word."""
    try:
        phase, step, number, stop = payload.decode("ascii").split(" ")
        return Word(Phase(phase), int(step), int(number), bool(int(stop)))
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks handed in, put together."""

    step: int
    number: int
    stop: bool


def together(decision: Decision, phase: Phase, world_size: int) -> Agreed | None:
    """What the ranks have agreed on at a barrier.

    Returns:
        None if it failed, or not all of them were at that phase, or if they have not saved at one step.
    """
    if decision.outcome is not Outcome.RELEASED:
        return None
    words = [parse(payload) for payload in decision.payloads.values()]
    known = [word for word in words if word is not None and word.phase is phase]
    if len(known) < world_size or (phase is Phase.DONE and len({word.step for word in known}) > 1):
        return None
    return Agreed(
        max(word.step for word in known),
        max(word.number for word in known),
        any(word.stop for word in known),
    )


class Next(enum.Enum):
    """What a rank does after a step."""

    GO_ON = enum.auto()
    WAIT = enum.auto()
    """Hear what all have said, before it goes on."""
    SAVE = enum.auto()


class Course:
    """How far one rank is on the way from a request to a save of all.

    Args:
        world_size: the number of ranks.
        position: the rank's next barrier in the group; what was asked for before is not this process's.
    """

    def __init__(self, world_size: int, position: int) -> None:
        self._world_size = world_size
        self._done = 0
        """The newest request for which all have saved."""
        self._failed_at = position - 1
        """The newest barrier that failed: what was asked for before is left to the job's next life."""
        self._bound: int | None = None
        """Beyond which step this rank does not go; None: it has said nothing."""
        self._agreed: Agreed | None = None
        self._saved_at: int | None = None
        """After which step the save is made that is not done."""

    def wants(self, asked: SaveAsked | None) -> bool:
        """Whether there is something to agree on."""
        return self.stands(asked) and asked is not None and asked.since > self._failed_at

    def stands(self, asked: SaveAsked | None) -> bool:
        """Whether a request is one that not all have saved for, be it this process's or not."""
        return asked is not None and not asked.withdrawn and asked.number > self._done

    @property
    def idle(self) -> bool:
        """Whether this rank has said nothing that others wait for, and heard nothing that it is to do."""
        return self._bound is None and self._agreed is None

    @property
    def saves(self) -> bool:
        """Whether the agreed step was reached, and the save is not done."""
        return self._saved_at is not None

    def promise(self, step: int) -> None:
        """Go no further than two steps beyond this one before all have answered."""
        bound = step + AHEAD
        self._bound = bound if self._bound is None else max(self._bound, bound)

    def after(self, step: int) -> Next:
        """What to do after a step."""
        if self._agreed is not None:
            if self.saves or step < self._agreed.step:
                return Next.GO_ON
            self._saved_at = step
            return Next.SAVE
        return Next.WAIT if self._bound is not None and step >= self._bound else Next.GO_ON

    def word(self, asked: SaveAsked | None) -> bytes:
        """What to hand in now.

        Args:
            asked: what is asked for, as far as this rank has heard.
        """
        if self._agreed is not None:
            assert self._saved_at is not None
            phase, step, number, stop = Phase.DONE, self._saved_at, self._agreed.number, self._agreed.stop
        else:
            assert self._bound is not None
            phase, step, number, stop = Phase.AGREE, self._bound, 0, False
        if asked is not None and not asked.withdrawn:
            number, stop = max(number, asked.number), stop or asked.stop
        return Word(phase, step, number, stop).encode()

    def heard(self, decision: Decision) -> bool:
        """Take the decision on a step; False: the ranks have not agreed on one."""
        self._agreed = together(decision, Phase.AGREE, self._world_size)
        self._bound = None
        if self._agreed is None:
            self._failed_at = decision.sequence
        return self._agreed is not None

    def finished(self, decision: Decision) -> Agreed | None:
        """Take the decision on whether all have saved; None: not all have, or not at the same step."""
        finished = together(decision, Phase.DONE, self._world_size)
        self._agreed = self._saved_at = None
        if finished is None:
            self._failed_at = decision.sequence
        else:
            self._done = finished.number
        return finished
