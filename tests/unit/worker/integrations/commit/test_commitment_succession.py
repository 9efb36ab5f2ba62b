"""A save that begins before the one before it has ended, and saves at the end of the process."""

from typing import Any

import pytest

from lab.patience import PATIENCE
from muster.worker.decision import Outcome
from muster.worker.errors import (
    MemberLostError,
    OutcomeUnknownError,
    RefusedError,
)
from muster.worker.integrations.commit import commitment as module
from muster.worker.integrations.commit.commitment import Commitment
from muster.worker.integrations.commit.words import DONE, GIVEN_UP
from tests.support.rendezvous_runs import in_thread
from tests.support.saves.scripted_barrier import ScriptedBarrier, decided
from tests.unit.worker.integrations.commit.scripted_saves import begun


def another(barrier: ScriptedBarrier) -> Commitment:
    as_barrier: Any = barrier
    return Commitment(as_barrier, 60.0)


def test_new_save_gives_up_the_unfinished_save_of_the_same_thread():
    _, barrier = begun()
    barrier.answers.put(decided(Outcome.MEMBER_LOST))
    second = another(barrier)
    assert barrier.heard() == GIVEN_UP
    assert second.number == 2
    barrier.answers.put(RefusedError("rank 0 was evicted", "EVICTED"))
    second.join(PATIENCE)


def test_the_same_if_the_thread_of_that_save_has_ended():
    first, barrier = in_thread(begun).result(PATIENCE)
    first.caller.join(PATIENCE)
    second = in_thread(lambda: another(barrier))
    assert barrier.heard() == GIVEN_UP
    barrier.answers.put(decided(Outcome.MEMBER_LOST))
    assert second.result(PATIENCE).number == 2
    barrier.answers.put(RefusedError("rank 0 was evicted", "EVICTED"))


def test_a_save_in_another_thread_is_waited_for():
    first, barrier = begun()
    second = in_thread(lambda: another(barrier))
    result = in_thread(first.written)
    assert barrier.heard() == DONE
    barrier.answers.put(decided())
    result.result(PATIENCE)
    assert not second.done()
    first.committed()
    assert barrier.heard() == DONE
    barrier.answers.put(decided())
    assert second.result(PATIENCE).number == 3
    barrier.answers.put(RefusedError("rank 0 was evicted", "EVICTED"))


def test_at_the_end_of_the_process_it_waits_for_the_last_word():
    save, barrier = begun()
    barrier.answers.put(decided(Outcome.MEMBER_LOST))
    module._hear_the_end()
    assert barrier.heard() == GIVEN_UP
    with pytest.raises(MemberLostError):
        save.written()


def test_save_after_an_interrupted_wait_also_waits_for_the_unfinished_save(
    monkeypatch: pytest.MonkeyPatch,
):
    first, barrier = begun()
    join = first.join

    def interrupted(timeout: float | None = None) -> None:
        monkeypatch.setattr(first, "join", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(first, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        another(barrier)
    assert barrier.heard() == GIVEN_UP
    third = in_thread(lambda: another(barrier))
    assert not third.done()
    barrier.answers.put(decided(Outcome.MEMBER_LOST))
    assert third.result(PATIENCE).number == 2
    barrier.answers.put(RefusedError("rank 0 was evicted", "EVICTED"))


def test_nobody_waits_for_a_save_that_waits_for_a_coordinator_that_is_gone():
    first, barrier = begun()
    for _ in range(2):
        barrier.answers.put(OutcomeUnknownError("away", "checkpoint/dcp", 1, Outcome.UNKNOWN))
    with pytest.raises(OutcomeUnknownError):
        first.written()
    with pytest.raises(OutcomeUnknownError, match="away"):
        another(barrier)
    barrier.answers.put(decided(Outcome.MEMBER_LOST))
    first.join(PATIENCE)
