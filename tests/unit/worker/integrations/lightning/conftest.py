"""Fixtures of the tests of Lightning's strategies."""

import pytest

from muster.worker.integrations import lightning as module
from tests.unit.worker.integrations.lightning.strategies import Alone


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, saves_end_with_their_test: None) -> None:
    monkeypatch.setattr(Alone, "sequence", 0)
    monkeypatch.setattr(module, "GrpcBarrier", Alone)
