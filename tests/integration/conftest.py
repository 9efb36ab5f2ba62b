"""Fixtures of the integration tests: real processes, real sockets."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import muster.worker
from lab.patience import PATIENCE
from lab.processes import fork_client
from lab.processes.coordinator import Coordinator
from lab.processes.relay import RelayedCoordinator
from tests.support.deploy import helm as charts

# A shell that starts this in the background lets it ignore SIGINT, and every process that it starts, too.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that are marked ``also_through_relay`` meet the coordinator directly, and through a relay."""
    marked = metafunc.definition.get_closest_marker("also_through_relay")
    if marked is not None and "coordinator" in metafunc.fixturenames:
        metafunc.parametrize("coordinator", ["direct", "relayed"], indirect=True)


fork_client.forks = True


@pytest.fixture(scope="session", autouse=True)
def _spawned_processes_are_forked() -> Iterator[None]:
    """Ranks, above all."""
    with fork_client.spawning():
        yield


@pytest.fixture
def coordinator(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Coordinator]:
    """A coordinator on SQLite with a short session TTL; ``@back_in_time`` makes it a long one."""
    patient = request.node.get_closest_marker("back_in_time") is not None
    kind = RelayedCoordinator if getattr(request, "param", "") == "relayed" else Coordinator
    with kind(tmp_path, session_ttl=PATIENCE if patient else 3.0) as running:
        yield running
        # A later coordinator may get the same port, and must not meet this one's sessions.
        muster.worker.close()


@pytest.fixture(scope="session")
def helm() -> Iterator[charts.Helm]:
    """Helm, started once."""
    with charts.running() as process:
        yield process
