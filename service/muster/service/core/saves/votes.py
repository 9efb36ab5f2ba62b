"""What the votes of all ranks at a barrier come to."""

from muster.client.save_votes import SaveVote, votes_of_all
from muster.service.core.vocabulary.model import Decision, Outcome


def released_votes(decision: Decision | None) -> list[SaveVote]:
    """Return the votes of all ranks; empty if the barrier failed or the votes differ."""
    if decision is None or decision.outcome is not Outcome.RELEASED:
        return []
    return votes_of_all((payload for _, payload in decision.payloads), decision.required)
