"""Fixtures of the tests of several replicas."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import muster.worker
from muster.client import replicas
from tests.support.replica_clients import Succession


@pytest.fixture
def no_known_addresses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the addresses of earlier tests: ports are used again, by other servers."""
    monkeypatch.setattr(replicas, "_all", {})
    yield
    muster.worker.close()


@pytest.fixture
def succession(tmp_path: Path) -> Iterator[Succession]:
    made = Succession(tmp_path)
    try:
        yield made
        muster.worker.close()
    finally:
        made.end()
