"""A vote that is repeated until its outcome is known."""

from typing import Any, NoReturn

import pytest

from muster.worker import GroupBarrier, WriteReport
from muster.worker.decision import Decision, Outcome
from muster.worker.errors import MusterError, OutcomeUnknownError, RefusedError
from muster.worker.groups.pending import EarlyWarning
from muster.worker.groups.voting import VotingBarrier
from muster.worker.saves.local_barrier import LocalBarrier

DECISION = Decision("save", 3, Outcome.ABORTED, "rank 1 failed")
VOTE = "disk full", 7.0, b"word", EarlyWarning(1.0, "hint"), WriteReport(step=9)


class RecordingBarrier(VotingBarrier):
    """Answers each vote by the next of some answers."""

    def __init__(self, *answers: Decision | MusterError) -> None:
        self.answers = list(answers)
        self.votes: list[tuple[Any, ...]] = []

    def vote(self, *vote: Any) -> Decision:
        self.votes.append(vote)
        answer = self.answers.pop(0)
        if isinstance(answer, MusterError):
            raise answer
        return answer


def unknown() -> OutcomeUnknownError:
    return OutcomeUnknownError("away", "save", 3, Outcome.UNKNOWN)


def test_vote_is_repeated_unchanged_until_it_is_decided():
    first, second = unknown(), unknown()
    barrier = RecordingBarrier(first, second, DECISION)
    heard: list[MusterError] = []
    assert barrier.vote_until_decided(heard.append, *VOTE) is DECISION
    assert heard == [first, second]
    assert barrier.votes == [VOTE] * 3


def test_vote_ends_without_a_decision_if_its_callback_raises():
    barrier = RecordingBarrier(unknown(), DECISION)

    def give_up(error: OutcomeUnknownError) -> NoReturn:
        raise error

    with pytest.raises(OutcomeUnknownError):
        barrier.vote_until_decided(give_up)
    assert barrier.answers == [DECISION]


def test_vote_is_not_repeated_after_a_refusal():
    barrier = RecordingBarrier(RefusedError("evicted", "EVICTED"), DECISION)
    heard: list[MusterError] = []
    with pytest.raises(RefusedError):
        barrier.vote_until_decided(heard.append)
    assert (heard, len(barrier.votes)) == ([], 1)


def test_barriers_of_one_rank_and_of_a_group_repeat_votes():
    assert issubclass(GroupBarrier, VotingBarrier)
    assert LocalBarrier("save", "job", 0).vote_until_decided(lambda _: None, "disk full").failures
