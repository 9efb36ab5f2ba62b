"""A vote that is repeated until its outcome is known."""

from typing import NoReturn

import pytest

from muster.worker import GroupBarrier, WriteReport
from muster.worker.decision import Decision, Outcome
from muster.worker.errors import MusterError, OutcomeUnknownError, RefusedError
from muster.worker.groups.pending import EarlyWarning
from muster.worker.groups.voting import VotingBarrier
from muster.worker.saves.local_barrier import LocalBarrier
from tests.support.saves.scripted_barrier import ScriptedBarrier

DECISION = Decision("save", 3, Outcome.ABORTED, "rank 1 failed")
VOTE = "disk full", 7.0, b"word", EarlyWarning(1.0, "hint"), WriteReport(step=9)


def answering(*answers: Decision | MusterError) -> ScriptedBarrier:
    barrier = ScriptedBarrier()
    for answer in answers:
        barrier.answers.put(answer)
    return barrier


def unknown() -> OutcomeUnknownError:
    return OutcomeUnknownError("away", "save", 3, Outcome.UNKNOWN)


def test_vote_is_repeated_unchanged_until_it_is_decided():
    first, second = unknown(), unknown()
    barrier = answering(first, second, DECISION)
    heard: list[MusterError] = []
    decision = barrier.vote_until_decided(heard.append, *VOTE)
    assert (decision.outcome, decision.message) == (DECISION.outcome, DECISION.message)
    assert heard == [first, second]
    assert [barrier.heard() for _ in range(3)] == ["disk full"] * 3
    assert (barrier.timeouts, barrier.reports) == ([7.0] * 3, [WriteReport(step=9)] * 3)


def test_vote_ends_without_a_decision_if_its_callback_raises():
    barrier = answering(unknown(), DECISION)

    def give_up(error: OutcomeUnknownError) -> NoReturn:
        raise error

    with pytest.raises(OutcomeUnknownError):
        barrier.vote_until_decided(give_up)
    assert barrier.answers.qsize() == 1


def test_vote_is_not_repeated_after_a_refusal():
    barrier = answering(RefusedError("evicted", "EVICTED"), DECISION)
    heard: list[MusterError] = []
    with pytest.raises(RefusedError):
        barrier.vote_until_decided(heard.append)
    assert (heard, len(barrier.timeouts)) == ([], 1)


def test_barriers_of_one_rank_and_of_a_group_repeat_votes():
    assert issubclass(GroupBarrier, VotingBarrier)
    assert LocalBarrier("save", "job", 0).vote_until_decided(lambda _: None, "disk full").failures
