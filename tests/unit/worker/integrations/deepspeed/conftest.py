"""Engines that commit, in a job of one rank."""

from typing import Any

import pytest

from muster.worker.integrations import deepspeed as module
from muster.worker.integrations.commit import commitment
from muster.worker.integrations.deepspeed import commit_together
from tests.unit.worker.integrations.deepspeed.engines import Alone, Comm, DecoupledCheckpointEngine, Engine


@pytest.fixture(autouse=True)
def comm(monkeypatch: pytest.MonkeyPatch) -> Comm:
    monkeypatch.setattr(commitment, "_last", {})
    monkeypatch.setattr(commitment, "_highest", {})
    monkeypatch.setattr(module, "GrpcBarrier", Alone)
    monkeypatch.setattr(module, "_swept", set())
    alone = Comm()
    monkeypatch.setattr(module, "comm", alone)
    return alone


@pytest.fixture
def engine() -> Any:
    return commit_together(Engine())


@pytest.fixture
def decoupled() -> Any:
    return commit_together(Engine(DecoupledCheckpointEngine()))
