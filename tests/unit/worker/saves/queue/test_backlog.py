"""When training waits for saves, and when a save is refused."""

from itertools import count

import pytest

from muster.worker.saves.queue import backlog
from muster.worker.saves.queue.backlog import (
    MAX_UNDECIDED,
    MAX_UNDER_WAY,
    MAX_WAIT,
    POLL_INTERVAL,
    BacklogError,
    check_backlog,
    wait_until_few,
)


class Clock:
    """Moves on with each wait alone. None takes time."""

    def __init__(self) -> None:
        self.waits = 0

    def sleep(self, seconds: float) -> None:
        assert seconds == POLL_INTERVAL
        assert self.now() < MAX_WAIT, "it waits for ever"
        self.waits += 1

    def now(self) -> float:
        return self.waits * POLL_INTERVAL


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(backlog, "sleep", clock.sleep)
    monkeypatch.setattr(backlog, "monotonic", clock.now)
    return clock


def test_training_waits_until_few_enough_saves_are_under_way(clock: Clock, caplog: pytest.LogCaptureFixture):
    counts = [MAX_UNDER_WAY + 2, MAX_UNDER_WAY + 1, MAX_UNDER_WAY + 1, MAX_UNDER_WAY]
    wait_until_few(iter(counts).__next__, lambda: True)
    assert clock.waits == len(counts) - 1
    first, last = caplog.messages
    assert first.startswith(f"training waits in save(): {MAX_UNDER_WAY + 2} saves are not decided")
    assert last == "training has waited in save() for 0.2 s"


def test_training_does_not_wait_beside_few_saves(clock: Clock, caplog: pytest.LogCaptureFixture):
    wait_until_few(lambda: MAX_UNDER_WAY, lambda: True)
    assert (clock.waits, caplog.messages) == (0, [])


def test_training_does_not_wait_for_a_coordinator_that_is_away(clock: Clock):
    contact = [True, False]
    wait_until_few(lambda: MAX_UNDECIDED, iter(contact).__next__)
    assert clock.waits == 1


def test_training_does_not_wait_for_ever(clock: Clock):
    """The thread that decides may need a lock that the waiting one holds."""
    wait_until_few(map(lambda _: MAX_UNDECIDED, count()).__next__, lambda: True)
    assert clock.now() == pytest.approx(MAX_WAIT, abs=POLL_INTERVAL)


@pytest.mark.parametrize(("has_contact", "said"), [(False, "the coordinator is away"), (True, "too slow")])
def test_save_is_refused_beside_many_undecided_ones(has_contact: bool, said: str):
    check_backlog(MAX_UNDECIDED - 1, has_contact=has_contact)
    with pytest.raises(BacklogError, match=said):
        check_backlog(MAX_UNDECIDED, has_contact=has_contact)
