"""Keepers of several nodes, each with a folder of its own, at one fake coordinator."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.keeping.fake_service import FakeService
from tests.support.keeping.nodes import Nodes


@pytest.fixture
def service() -> Iterator[FakeService]:
    with FakeService() as running:
        yield running


@pytest.fixture
def nodes(tmp_path: Path, service: FakeService) -> Iterator[Nodes]:
    with Nodes(tmp_path, service) as running:
        yield running
