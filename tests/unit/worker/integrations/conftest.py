"""Fixtures of the adapters' tests."""

import threading
from collections.abc import Iterator

import pytest

from muster.worker.integrations.commit import commitment

END_OF_SAVE_SECONDS = 30.0


@pytest.fixture(autouse=True)
def _nobody_saved_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commitment, "_last", {})
    monkeypatch.setattr(commitment, "_highest", {})


@pytest.fixture
def saves_end_with_their_test() -> Iterator[None]:
    """Wait for the threads of this test's saves: one that votes later votes in the next test."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("muster-commit-"):
            thread.join(END_OF_SAVE_SECONDS)
            assert not thread.is_alive(), f"{thread.name} still runs after the test"
