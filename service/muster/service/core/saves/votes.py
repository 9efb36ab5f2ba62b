"""What the votes of all ranks at a barrier come to."""

from muster.client.save_votes import Phase, SaveVote, parse_vote
from muster.service.core.vocabulary.model import Decision, Outcome


def released_votes(decision: Decision | None) -> list[SaveVote]:
    """Return the votes of all ranks; empty if the barrier failed or the votes differ."""
    if decision is None or decision.outcome is not Outcome.RELEASED:
        return []
    votes = [vote for _, payload in decision.payloads if (vote := parse_vote(payload)) is not None]
    whole = len(votes) == decision.required and len({vote.phase for vote in votes}) == 1
    if not whole or (votes[0].phase is Phase.DONE and len({vote.step for vote in votes}) > 1):
        return []
    return votes
