"""Callers: one forks a child for each save, the other keeps one worker."""

from collections.abc import Iterator
from typing import Any

import pytest

from muster.worker.saves import ForkCaller, PersistentCaller


@pytest.fixture(scope="module")
def persistent() -> Iterator[PersistentCaller]:
    """One worker for all tests here."""
    caller = PersistentCaller()
    yield caller
    caller.close()


@pytest.fixture(params=["fork", "persistent"])
def caller(request: pytest.FixtureRequest) -> Any:
    return ForkCaller() if request.param == "fork" else request.getfixturevalue("persistent")
