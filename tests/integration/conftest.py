"""Fixtures of the integration tests: real processes, real sockets."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.coordinator import Coordinator


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    """A coordinator on SQLite with a short session TTL."""
    with Coordinator(tmp_path, session_ttl=3.0) as running:
        yield running
