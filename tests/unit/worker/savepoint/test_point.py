"""The place in the training loop, without a coordinator: what it asks, when it waits, what it gives back."""

import os
import queue
import signal
import threading
import time
from typing import Any, ClassVar

import pytest

from muster.worker import SavePoint
from muster.worker.decision import Decision, Outcome
from muster.worker.errors import BarrierAbortedError, MusterError, OutcomeUnknownError
from muster.worker.savepoint import notices, point
from muster.worker.savepoint.agreement import PREFIX
from muster.worker.savepoint.asked import SaveAsked
from muster.worker.session import SessionConfig

ASKED = SaveAsked(1, 0, stop=False, reason="asked for by ann")


class FakeBarrier:
    """A group of two ranks, of which the other one says what the test does."""

    made: ClassVar[list["FakeBarrier"]] = []

    def __init__(self, *arguments: Any) -> None:
        self.rank, self.world_size = 0, 2
        self.config = SessionConfig(endpoint="host:1", run_id="job", generation=0, rank=0, host="here")
        self.save_asked: SaveAsked | None = None
        self.said: list[str] = []
        self.failures: list[str | None] = []
        self.answers: queue.SimpleQueue[Decision | Exception | str] = queue.SimpleQueue()
        FakeBarrier.made.append(self)

    def vote(
        self, failure: str | None = None, timeout_secs: float | None = None, payload: bytes = b""
    ) -> Decision:
        self.said.append(payload.decode())
        self.failures.append(failure)
        answer = self.answers.get(timeout=60)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Decision):
            return answer
        return Decision(
            PREFIX, len(self.said) - 1, Outcome.RELEASED, "", payloads={0: payload, 1: answer.encode()}
        )


@pytest.fixture(autouse=True)
def _no_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(point, "GrpcBarrier", FakeBarrier)


def made() -> tuple[SavePoint, FakeBarrier]:
    return SavePoint(), FakeBarrier.made[-1]


def failed(outcome: Outcome, sequence: int = 0) -> Decision:
    return Decision(PREFIX, sequence, outcome, "rank 1 was lost")


def test_nothing_is_said_while_nothing_is_asked_for():
    save, group = made()
    assert not any(save.reached(step) for step in range(100))
    assert group.said == []
    save.close()
    assert group.said == []


def test_it_goes_on_to_its_bound_and_saves_at_the_step_of_all():
    save, group = made()
    group.save_asked = ASKED
    assert not save.reached(7)
    assert not save.reached(8)
    group.answers.put("agree 10 1 0")
    assert not save.reached(9)
    assert save.reached(10)
    assert group.said == ["agree 9 1 0"]
    assert not save.reached(10)
    group.answers.put("done 10 1 0")
    save.done()
    assert not save.stop
    assert group.said[1:] == ["done 10 1 0"]
    assert not any(save.reached(step) for step in range(11, 20))


def test_whether_training_ends_is_what_any_rank_has_heard():
    save, group = made()
    group.save_asked = ASKED
    save.reached(7)
    group.answers.put("agree 9 1 0")
    assert save.reached(9)
    group.answers.put("done 9 2 1")
    save.done()
    assert save.stop


def test_what_the_ranks_could_not_agree_on_is_not_tried_again(caplog: pytest.LogCaptureFixture):
    save, group = made()
    group.save_asked = ASKED
    save.reached(7)
    group.answers.put(failed(Outcome.MEMBER_LOST))
    assert not any(save.reached(step) for step in range(9, 20))
    assert "the ranks did not agree on a step to save at: rank 1 was lost" in caplog.text
    assert len(group.said) == 1


def test_an_unknown_outcome_is_asked_for_again_with_the_same_word():
    save, group = made()
    group.save_asked = ASKED
    save.reached(7)
    group.answers.put(OutcomeUnknownError("away", PREFIX, 0, Outcome.UNKNOWN))
    with pytest.raises(OutcomeUnknownError):
        save.reached(9)
    group.answers.put("agree 9 1 0")
    assert save.reached(9)
    assert group.said == ["agree 9 1 0", "agree 9 1 0"]


@pytest.mark.parametrize(
    ("answer", "error"), [(failed(Outcome.ABORTED, 1), BarrierAbortedError), ("agree 12 1 0", MusterError)]
)
def test_a_save_that_not_all_have_made_is_an_error(answer: Decision | str, error: type[Exception]):
    save, group = made()
    group.save_asked = ASKED
    save.reached(7)
    group.answers.put("agree 9 1 0")
    assert save.reached(9)
    group.answers.put(answer)
    with pytest.raises(error):
        save.done()
    assert not save.reached(10)


def test_done_is_said_of_a_save():
    save, _ = made()
    with pytest.raises(MusterError, match="reached"):
        save.done()


def test_who_takes_no_more_part_says_so_to_those_who_wait():
    save, group = made()
    group.save_asked = ASKED
    group.answers.put(failed(Outcome.ABORTED))
    save.close()
    assert group.failures == ["its training is over"]


def test_a_signal_asks_for_all_calls_its_own_handler_and_is_given_back(monkeypatch: pytest.MonkeyPatch):
    asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
    own: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: own.append(number))

    def ask(search: object, channel: object, method: object, request: Any, *_: object, **__: object) -> None:
        asked.put(request)

    monkeypatch.setattr(notices, "ask_leader", ask)
    try:
        handler = signal.getsignal(signal.SIGUSR2)
        with SavePoint(signals=[signal.SIGUSR2]):
            os.kill(os.getpid(), signal.SIGUSR2)
            request = asked.get(timeout=60)
            assert (request.run_id, request.stop, request.by, request.reason) == (
                *("job", True),
                *("rank 0 (here)", "SIGUSR2"),
            )
            assert own == [signal.SIGUSR2]
        assert signal.getsignal(signal.SIGUSR2) is handler
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_forked_child_ends_by_a_signal_as_if_nobody_had_asked_for_it():
    with SavePoint(signals=[signal.SIGTERM]):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            os.write(write, b"x")
            while True:
                time.sleep(60)  # Until the signal ends it.
        assert os.read(read, 1) == b"x"
        os.close(read)
        os.close(write)
        os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


def test_signals_are_the_main_threads():
    errors: list[BaseException] = []

    def make() -> None:
        try:
            SavePoint(signals=[signal.SIGUSR2])
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
