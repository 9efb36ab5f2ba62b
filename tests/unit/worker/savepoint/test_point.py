"""The place in the training loop, without a coordinator: what it asks, when it waits, what it gives back."""

import os
import queue
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from lab.patience import PATIENCE
from muster.client.errors import EnvironmentValueError
from muster.client.save_votes import PREFIX
from muster.worker import SavePoint, environment
from muster.worker.decision import Decision, Outcome
from muster.worker.errors import BarrierAbortedError, MusterError, OutcomeUnknownError, RefusedError
from muster.worker.savepoint import notices, point
from muster.worker.session.save_request import SaveAsked
from muster.worker.session.session import SessionConfig
from tests.support.saves.scripted_barrier import ScriptedBarrier

ASKED = SaveAsked(1, 0, stop=False, reason="asked for by ann")


class SavePointBarrier(ScriptedBarrier):
    """The save point's barrier of a group of two ranks, to which the test also pushes requests."""

    prefix = PREFIX
    gives_timeouts = False
    made: ClassVar[list["SavePointBarrier"]] = []
    first: ClassVar[int] = 0
    """The sequence of its first vote."""
    standing: ClassVar[SaveAsked | None] = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self.sequence = SavePointBarrier.first
        self.config = SessionConfig(endpoint="host:1", run_id="job", generation=0, rank=0, host="here")
        self.save_asked = SavePointBarrier.standing
        self.skipped_to = 0
        self._pushes: queue.SimpleQueue[SaveAsked | None] = queue.SimpleQueue()
        SavePointBarrier.made.append(self)

    def ask(self, asked: SaveAsked) -> None:
        self.save_asked = asked
        self._pushes.put(asked)

    def end(self) -> None:
        self._pushes.put(None)

    def next_save_asked(self, known: SaveAsked | None) -> SaveAsked:
        asked = self._pushes.get()
        if asked is None:
            raise MusterError("the session is over.")
        return asked

    def skip_to(self, sequence: int) -> None:
        self.skipped_to = sequence

    def heard(self) -> str:
        """The words of the next vote, or after ``fails:`` its failure."""
        said = super().heard()
        return said.decode() if isinstance(said, bytes) else f"fails: {said}"


@pytest.fixture(autouse=True)
def _no_coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(point, "GrpcBarrier", SavePointBarrier)
    SavePointBarrier.made.clear()
    yield
    for one in SavePointBarrier.made:
        one.end()


def made() -> tuple[SavePoint, SavePointBarrier]:
    return SavePoint(), SavePointBarrier.made[-1]


def failed(outcome: Outcome, sequence: int = 0) -> Decision:
    return Decision(PREFIX, sequence, outcome, "rank 1 was lost")


def agreed(step: int = 10) -> tuple[SavePoint, SavePointBarrier]:
    """One whose ranks are to save at a step, which this one has come to."""
    save, group = made()
    assert not save.reached(9)
    group.ask(ASKED)
    assert group.heard() == "agree 10 1 0"
    group.answers.put(f"agree {step} 1 0")
    assert save.reached(step)
    return save, group


def test_save_point_is_silent_without_a_request():
    save, group = made()
    assert not any(save.reached(step) for step in range(100))
    save.close()
    assert group.said.empty()


def test_save_point_answers_beside_the_main_thread_and_saves_once():
    save, group = made()
    assert not save.reached(8)
    group.ask(ASKED)
    # The main thread may be in a collective that the others' answers wait for.
    assert group.heard() == "agree 9 1 0"
    group.answers.put("agree 12 1 0")
    assert not save.reached(9)
    assert not save.reached(11)
    assert save.reached(12)
    assert not save.reached(12)
    group.answers.put("done 12 1 0")
    save.done()
    assert group.heard() == "done 12 1 0"
    assert not save.stop
    assert not any(save.reached(step) for step in range(13, 20))


def test_deadline_is_known_from_the_agreed_step_until_done(caplog: pytest.LogCaptureFixture):
    save, group = made()
    assert not save.reached(9)
    group.ask(replace(ASKED, deadline=time.monotonic() + 90))
    assert group.heard() == "agree 10 1 0"
    assert re.search(r"asked for by ann; (90|8\d) s left", caplog.text)
    group.answers.put("agree 10 1 0")
    assert save.reached(10)
    assert (save.deadline or 0.0) > time.monotonic()
    group.ask(replace(ASKED, deadline=25.0))
    assert (save.deadline or 0.0) == 25.0
    group.answers.put("done 10 1 0")
    save.done()
    assert group.heard() == "done 10 1 0"
    assert save.deadline is None


def test_request_announced_again_is_voted_on_once():
    save, group = made()
    assert not save.reached(9)
    for deadline in (90.0, 60.0, 25.0):
        group.ask(replace(ASKED, deadline=deadline))
    assert group.heard() == "agree 10 1 0"
    group.answers.put(failed(Outcome.MEMBER_LOST))
    group.ask(replace(ASKED, deadline=12.0))
    # The request of another number is the next one to be voted on.
    group.ask(SaveAsked(2, 1, stop=False, reason=""))
    assert group.heard() == "agree 10 2 0"
    group.answers.put(failed(Outcome.MEMBER_LOST, 1))


def test_save_point_answers_only_after_the_first_step():
    save, group = made()
    group.ask(ASKED)
    assert not save.reached(41)
    assert group.heard() == "agree 42 1 0"
    group.answers.put("agree 42 1 0")


def test_training_stops_if_any_rank_was_asked_to_stop():
    save, group = agreed()
    group.answers.put("done 10 2 1")
    save.done()
    assert save.stop


def test_failed_agreement_is_logged_and_not_repeated(caplog: pytest.LogCaptureFixture):
    save, group = made()
    save.reached(8)
    group.ask(ASKED)
    group.heard()
    group.answers.put(failed(Outcome.MEMBER_LOST))
    assert not any(save.reached(step) for step in range(9, 20))
    assert "the ranks did not agree on a step to save at: rank 1 was lost" in caplog.text
    assert group.said.empty()


def test_unknown_outcome_is_raised_and_the_vote_repeated():
    save, group = made()
    save.reached(8)
    group.ask(ASKED)
    group.answers.put(OutcomeUnknownError("away", PREFIX, 0, Outcome.UNKNOWN))
    assert [group.heard(), group.heard()] == ["agree 9 1 0"] * 2
    with pytest.raises(OutcomeUnknownError):
        save.reached(9)
    group.answers.put("agree 9 1 0")
    assert save.reached(9)


def test_evicted_rank_gets_the_refusal_at_each_call():
    save, group = made()
    save.reached(8)
    group.ask(ASKED)
    group.heard()
    group.answers.put(RefusedError("rank 0 was evicted", "EVICTED"))
    for step in (9, 9, 10):
        with pytest.raises(RefusedError, match="evicted"):
            save.reached(step)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (failed(Outcome.ABORTED, 1), BarrierAbortedError),
        ("agree 12 1 0", MusterError),
        ("done 11 1 0", MusterError),
    ],
)
def test_save_that_some_ranks_missed_raises(answer: Decision | str, error: type[Exception]):
    save, group = agreed()
    group.answers.put(answer)
    with pytest.raises(error):
        save.done()
    assert not save.reached(11)


def test_done_raises_without_a_save():
    save, _ = made()
    with pytest.raises(MusterError, match="reached"):
        save.done()


def test_step_must_be_a_whole_number():
    save, _ = made()
    with pytest.raises(TypeError):
        save.reached(9.0)  # type: ignore[arg-type]


def test_closed_save_point_fails_later_requests():
    save, group = made()
    save.reached(7)
    save.close()
    for number in (1, 2):
        group.ask(SaveAsked(number, number - 1, stop=False, reason=""))
        assert group.heard() == "fails: its training is over"
        group.answers.put(failed(Outcome.ABORTED, number - 1))


def test_rank_that_closes_instead_of_saving_fails_the_others():
    save, group = agreed()
    save.close()
    assert group.heard() == "fails: its training is over"
    group.answers.put(failed(Outcome.ABORTED, 1))


def test_rank_that_restarts_alone_fails_the_open_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SavePointBarrier, "first", 1)
    monkeypatch.setattr(SavePointBarrier, "standing", ASKED)
    save, group = made()
    assert group.heard() == "fails: it alone has restarted"
    group.answers.put(failed(Outcome.ABORTED, 1))
    assert not save.reached(1)
    group.ask(SaveAsked(2, 2, stop=False, reason=""))
    assert group.heard() == "agree 2 2 0"
    assert group.skipped_to == 2
    group.answers.put(failed(Outcome.ABORTED, 2))


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> "queue.SimpleQueue[Any]":
    """What the coordinator is asked for."""
    asked: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask(search: object, channel: object, method: object, request: Any, *_: object, **__: object) -> None:
        asked.put(request)

    monkeypatch.setattr(notices, "ask_leader", ask)
    return asked


def test_signal_requests_a_save_and_calls_the_previous_handler(requests: "queue.SimpleQueue[Any]"):
    own: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: own.append(number))
    try:
        handler = signal.getsignal(signal.SIGUSR2)
        with SavePoint(signals=[signal.SIGUSR2]):
            os.kill(os.getpid(), signal.SIGUSR2)
            request = requests.get(timeout=60)
            assert (request.run_id, request.stop, request.known_number) == ("job", True, 0)
            assert (request.by, request.reason) == ("rank 0 (here)", "SIGUSR2")
            assert own == [signal.SIGUSR2]
        assert signal.getsignal(signal.SIGUSR2) is handler
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize(
    ("number", "timeout", "under_torchrun", "deadline"),
    [
        (signal.SIGTERM, "110", True, True),
        (signal.SIGTERM, "110", False, False),
        (signal.SIGTERM, "", True, False),
        (signal.SIGUSR2, "110", True, False),
    ],
)
def test_only_sigterm_of_torchrun_has_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
    requests: "queue.SimpleQueue[Any]",
    number: signal.Signals,
    timeout: str,
    under_torchrun: bool,
    deadline: bool,
):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", timeout)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job" if under_torchrun else "")
    before = signal.signal(number, lambda *_: None)
    try:
        with SavePoint(signals=[number]):
            os.kill(os.getpid(), number)
            request = requests.get(timeout=60)
            assert (0 < request.deadline_ms <= 110_000) is deadline
            assert (request.deadline_ms == 0) is not deadline
    finally:
        signal.signal(number, before)


def test_deadline_of_a_signal_counts_from_the_signal_at_each_attempt(
    monkeypatch: pytest.MonkeyPatch, requests: "queue.SimpleQueue[Any]"
):
    left: list[int] = []

    def fail(search: object, channel: object, method: object, request: Any, *_: object, **__: object) -> None:
        left.append(request.deadline_ms)
        if len(left) < 3:
            raise EnvironmentValueError("no token")
        requests.put(request)

    monkeypatch.setattr(notices, "ask_leader", fail)
    monkeypatch.setattr(notices, "PAUSE", 0.01)
    monkeypatch.setattr(environment, "shutdown_timeout", lambda: 60)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with SavePoint(signals=[signal.SIGTERM]):
            os.kill(os.getpid(), signal.SIGTERM)
            requests.get(timeout=60)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert 60_000 >= left[0] > left[1] > left[2] > 0


def test_signal_ends_a_forked_child_as_without_a_save_point():
    before = signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    try:
        with SavePoint(signals=[signal.SIGUSR2]):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    os.write(write, b"x")
                    time.sleep(PATIENCE)  # Until the signal ends it.
                finally:
                    os._exit(1)
            assert os.read(read, 1) == b"x"
            os.close(read)
            os.close(write)
            os.kill(pid, signal.SIGUSR2)
            _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGUSR2
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_signals_require_the_main_thread():
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
