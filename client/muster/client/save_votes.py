"""The votes by which ranks agree on a step to save at, as payloads of barriers."""

import enum
from collections.abc import Iterable
from typing import NamedTuple

from muster.client.protocol import MAX_STEP

PREFIX = "muster/save"
"""The group of the barriers at which ranks agree on a save and confirm it."""


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
    return vote if 0 <= vote.step <= MAX_STEP and 0 <= vote.number <= MAX_STEP else None


def votes_of_all(payloads: Iterable[bytes], required: int) -> list[SaveVote]:
    """Return the votes of all ranks at a released barrier.

    Args:
        payloads: those of the ranks.
        required: the number of ranks.

    Returns:
        Empty if a vote is missing or malformed, if the phases differ, or if ranks saved at different steps.
    """
    votes = [vote for payload in payloads if (vote := parse_vote(payload)) is not None]
    if len(votes) != required or len({vote.phase for vote in votes}) != 1:
        return []
    saved_apart = votes[0].phase is Phase.DONE and len({vote.step for vote in votes}) > 1
    return [] if saved_apart else votes
