"""The refusals of requests about local checkpoints."""

from muster.service.core.vocabulary.local import Attempt, KeeperInfo
from muster.service.core.vocabulary.refusal import Reason, Refusal


def attempt_superseded(run_id: str, attempt: Attempt) -> Refusal:
    """Return the refusal of a checkpoint that is not newer than all others.

    It keeps invariant 21 (one recovery decision for each round).
    """
    return Refusal(
        Reason.ATTEMPT_SUPERSEDED,
        f"attempt {attempt.generation}-{attempt.number} to save run {run_id} is over: a later attempt was "
        "committed, or the job has resumed from an earlier one. Nothing was committed. If this process "
        "belongs to a past life of the job, end it.",
    )


def permit_refused(run_id: str, attempt: Attempt) -> Refusal:
    """Return the refusal of a commit in shared storage."""
    return Refusal(
        Reason.ATTEMPT_SUPERSEDED,
        f"attempt {attempt.generation}-{attempt.number} to save run {run_id} may not be committed in shared "
        "storage now: the job has resumed from an earlier one, or a later one is committed there. If its "
        "turn comes, the orders say so.",
    )


def recovery_superseded(run_id: str, generation: int, number: int) -> Refusal:
    """Return the refusal of a rank that asks for an outdated decision."""
    return Refusal(
        Reason.RECOVERY_SUPERSEDED,
        f"the ranks of run {run_id} have gone beyond decision {number} of generation {generation} on what to "
        "resume from. This process is behind them: restart it with the others.",
    )


def recovery_mismatched(run_id: str, generation: int, number: int, first: int, other: int) -> Refusal:
    """Return the refusal of all ranks that ask for a decision with different world sizes.

    It keeps invariant 8 (Disagreement fails every rank).
    """
    return Refusal(
        Reason.RECOVERY_MISMATCHED,
        f"the ranks of run {run_id} ask for decision {number} of generation {generation} with world sizes "
        f"{first} and {other}. All of them are refused. Start all ranks of a generation with the same world "
        "size.",
    )


def keeper_replaced(run_id: str, keeper: KeeperInfo) -> Refusal:
    """Return the refusal that ends a keeper's stream when the keeper opens another one."""
    return Refusal(
        Reason.SESSION_REPLACED,
        f"keeper {keeper.id} of run {run_id} has opened another stream, from {keeper.url}. This one is over.",
    )


def keeper_unknown(run_id: str, keeper_id: str) -> Refusal:
    """Return the refusal of a report whose keeper has no open stream."""
    return Refusal(
        Reason.KEEPER_NOT_CONNECTED,
        f"keeper {keeper_id} of run {run_id} has no open stream here. Open one with all that it has; then "
        "report.",
    )
