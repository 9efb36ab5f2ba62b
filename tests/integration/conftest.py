"""Fixtures of the integration tests: real processes, real sockets."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import muster.worker
from tests.support.coordinator import Coordinator

# A shell that starts this in the background lets it ignore SIGINT, and every process that it starts, too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    """A coordinator on SQLite with a short session TTL."""
    with Coordinator(tmp_path, session_ttl=3.0) as running:
        yield running
        # A later coordinator may get the same port, and must not meet this one's sessions.
        muster.worker.close()
