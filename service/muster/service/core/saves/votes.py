"""The votes by which ranks agree on a save and confirm it, as payloads of barriers."""

import enum
from typing import NamedTuple

from muster.service.core.vocabulary.model import Decision, Outcome

MAX_INT64 = 2**63 - 1
"""The largest step, and the largest number of a request."""


class Phase(enum.StrEnum):
    """The purpose of a barrier of the group."""

    AGREE = "agree"
    DONE = "done"


class SaveVote(NamedTuple):
    """The payload of one rank: ``PHASE STEP NUMBER STOP``, in ASCII."""

    phase: Phase
    step: int
    """The last step that it may reach, or the step at which it saved."""
    number: int
    """The number of the newest request that it has heard."""
    stop: bool
    """Whether training ends after the save."""


def released_votes(decision: Decision | None) -> list[SaveVote]:
    """Return the votes of all ranks; empty if the barrier failed or the votes differ."""
    if decision is None or decision.outcome is not Outcome.RELEASED:
        return []
    votes = [vote for _, payload in decision.payloads if (vote := parse_vote(payload)) is not None]
    whole = len(votes) == decision.required and len({vote.phase for vote in votes}) == 1
    if not whole or (votes[0].phase is Phase.DONE and len({vote.step for vote in votes}) > 1):
        return []
    return votes


def parse_vote(payload: bytes) -> SaveVote | None:
    """Return a rank's vote; None if the payload is malformed."""
    try:
        phase, step, number, stop = payload.decode("ascii").split(" ")
        vote = SaveVote(Phase(phase), int(step), int(number), bool(int(stop)))
    except ValueError:
        return None
    return vote if 0 <= vote.step <= MAX_INT64 and 0 <= vote.number <= MAX_INT64 else None
