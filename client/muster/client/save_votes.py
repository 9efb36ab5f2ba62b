"""The votes by which ranks agree on a step to save at, as payloads of barriers."""

import enum
from typing import NamedTuple

PREFIX = "muster/save"
"""The group of the barriers at which ranks agree on a save and confirm it."""
MAX_INT64 = 2**63 - 1
"""The largest step, and the largest number of a request."""


class Phase(enum.StrEnum):
    """The purpose of a barrier of the group."""

    AGREE = "agree"
    DONE = "done"


class SaveVote(NamedTuple):
    """The payload of one rank."""

    phase: Phase
    step: int
    """The step that the rank does not pass before the decision, or the step at which it has saved."""
    number: int
    """The number of the newest request that it knows."""
    stop: bool
    """Whether training ends after the save."""

    def encode(self) -> bytes:
        """Return the payload: ``PHASE STEP NUMBER STOP``, in ASCII."""
        return f"{self.phase} {self.step} {self.number} {self.stop:d}".encode("ascii")


def parse_vote(payload: bytes) -> SaveVote | None:
    """Return a rank's vote; None if the payload is malformed."""
    try:
        phase, step, number, stop = payload.decode("ascii").split(" ")
        vote = SaveVote(Phase(phase), int(step), int(number), bool(int(stop)))
    except ValueError:
        return None
    return vote if 0 <= vote.step <= MAX_INT64 and 0 <= vote.number <= MAX_INT64 else None
