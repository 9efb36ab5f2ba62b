"""Fixtures of the tests of ``muster checkpoint``: a fixed time, no repeated reads, a bucket."""

from types import SimpleNamespace
from uuid import uuid4

import pytest

from muster.checkpoint import retry
from muster.checkpoint.bucket.fsspec_objects import FsspecObjects
from muster.service.cli.views import checkpoint_tables as checkpoint_views
from tests.unit.service.cli.views.checkpoint.commands import NOW


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_views, "time", SimpleNamespace(time=lambda: NOW))


@pytest.fixture(autouse=True)
def _no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "DELAYS", ())


@pytest.fixture
def objects() -> FsspecObjects:
    return FsspecObjects(f"memory://{uuid4().hex}", {})
