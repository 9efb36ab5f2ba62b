"""When a save waits for earlier ones, and when it is refused."""

import pytest

from muster.worker.saves.queue import backlog
from muster.worker.saves.queue.backlog import (
    MAX_UNDECIDED,
    MAX_UNDER_WAY,
    BacklogError,
    check_backlog,
    wait_for_earlier,
)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits that were made; none takes time."""
    made: list[float] = []
    monkeypatch.setattr(backlog, "sleep", made.append)
    return made


def test_save_waits_until_few_enough_are_under_way(waits: list[float]):
    counts = [MAX_UNDER_WAY + 1, MAX_UNDER_WAY, MAX_UNDER_WAY, MAX_UNDER_WAY - 1]
    wait_for_earlier(iter(counts).__next__, lambda: True)
    assert len(waits) == len(counts) - 1


def test_save_does_not_wait_for_a_coordinator_that_is_away(waits: list[float]):
    contact = [True, False]
    wait_for_earlier(lambda: MAX_UNDECIDED, iter(contact).__next__)
    assert len(waits) == 1


@pytest.mark.parametrize(
    ("undecided", "has_contact"), [(MAX_UNDECIDED - 1, False), (MAX_UNDECIDED, True), (0, True)]
)
def test_save_is_refused_only_if_many_wait_for_a_coordinator_that_is_away(undecided: int, has_contact: bool):
    check_backlog(undecided, has_contact=has_contact)
    with pytest.raises(BacklogError, match="away"):
        check_backlog(MAX_UNDECIDED, has_contact=False)
