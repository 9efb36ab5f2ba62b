"""Engines that commit, in a job of one rank."""

from typing import Any

import pytest

from muster.worker.integrations.deepspeed import attach, commit_together
from muster.worker.integrations.deepspeed import engine as engine_module
from tests.unit.worker.integrations.deepspeed.engines import (
    Alone,
    Comm,
    DecoupledCheckpointEngine,
    Engine,
    let_speak,
)


@pytest.fixture(autouse=True)
def comm(monkeypatch: pytest.MonkeyPatch) -> Comm:
    monkeypatch.setattr(attach, "GrpcBarrier", Alone)
    monkeypatch.setattr(engine_module, "_swept", set())
    alone = Comm()
    let_speak(alone, monkeypatch)
    return alone


@pytest.fixture
def engine() -> Any:
    return commit_together(Engine())


@pytest.fixture
def decoupled() -> Any:
    return commit_together(Engine(DecoupledCheckpointEngine()))
