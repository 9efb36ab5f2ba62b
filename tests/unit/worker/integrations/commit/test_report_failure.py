"""What a rank raises, and what it tells the others, when its part of a save raises."""

import pytest

from lab.patience import PATIENCE
from muster.worker.decision import Outcome
from muster.worker.errors import BarrierAbortedError, MemberLostError
from muster.worker.integrations.commit.commitment import ElsewhereError, report_failure
from muster.worker.integrations.commit.words import GIVEN_UP
from tests.support.rendezvous_runs import in_thread
from tests.support.saves.scripted_barrier import decided
from tests.unit.worker.integrations.commit.scripted_saves import begun

FULL = OSError(28, "No space left on device")


def test_rank_that_fails_itself_raises_its_own_error_at_once():
    save, barrier = begun()
    with pytest.raises(OSError, match="No space left") as raised, report_failure(save):
        raise FULL
    assert raised.value is FULL
    said = barrier.heard()
    assert isinstance(said, str)
    assert said.startswith("OSError: [Errno 28] No space left on device\n")
    barrier.answers.put(decided(Outcome.ABORTED))
    save.join(PATIENCE)


def test_rank_that_fails_itself_raises_the_error_of_all_if_asked_to():
    save, barrier = begun()
    left: list[str] = []

    def leave() -> None:
        left.append("collective")
        raise RuntimeError("the others are gone")

    def fail() -> None:
        with report_failure(save, leave, same_error=True):
            raise FULL

    result = in_thread(fail)
    barrier.heard()
    barrier.answers.put(decided(Outcome.ABORTED))
    with pytest.raises(BarrierAbortedError, match="is to blame") as raised:
        result.result(PATIENCE)
    assert raised.value.__cause__ is FULL
    assert left == ["collective"]


@pytest.mark.parametrize("same_error", [True, False])
def test_interruption_is_reported_and_waits_for_nothing(same_error: bool):
    save, barrier = begun()
    left: list[str] = []
    with (
        pytest.raises(KeyboardInterrupt),
        report_failure(save, lambda: left.append("collective"), same_error=same_error),
    ):
        raise KeyboardInterrupt
    assert str(barrier.heard()).startswith("KeyboardInterrupt")
    assert left == []
    barrier.answers.put(decided(Outcome.ABORTED))
    save.join(PATIENCE)


@pytest.mark.parametrize("same_error", [True, False])
@pytest.mark.parametrize(
    "error", [ElsewhereError("another rank cannot save."), RuntimeError("[gloo] Connection closed by peer")]
)
def test_failure_of_another_rank_is_not_taken_for_this_ranks(error: Exception, same_error: bool):
    save, barrier = begun()

    def fail() -> None:
        with report_failure(save, same_error=same_error):
            raise error

    result = in_thread(fail)
    assert barrier.heard() == GIVEN_UP
    barrier.answers.put(decided(Outcome.MEMBER_LOST))
    with pytest.raises(MemberLostError) as raised:
        result.result(PATIENCE)
    assert raised.value.__cause__ is error
