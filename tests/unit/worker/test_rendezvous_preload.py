"""The agent's fork server, which its workers start from."""

import gc
import logging
import os
from collections.abc import Iterator, Sequence

import pytest

from muster.preload.messages import SOCKET_VARIABLE
from muster.worker import rendezvous
from muster.worker.environment import DEFAULT_PRELOAD
from muster.worker.node import fork_server
from tests.unit.worker.fake_membership import made, without_coordinator


@pytest.fixture(autouse=True)
def fake_coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from without_coordinator(monkeypatch)


class FakeForkServer:
    """What the handler does with it."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = modules
        self.stopped = 0

    def stop(self) -> None:
        self.stopped += 1


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[FakeForkServer]:
    """All that have been started."""
    started: list[FakeForkServer] = []

    def start(modules: Sequence[str]) -> FakeForkServer | None:
        if not modules:
            return None
        started.append(FakeForkServer(modules))
        return started[-1]

    monkeypatch.setattr(rendezvous, "start_fork_server", start)
    return started


@pytest.mark.parametrize("program", ["muster-python", "/opt/job/bin/muster-python"])
def test_agent_has_a_fork_server_until_its_shutdown(
    servers: list[FakeForkServer], monkeypatch: pytest.MonkeyPatch, program: str
):
    monkeypatch.setenv("PYTHON_EXEC", program)
    handler, _ = made()
    (server,) = servers
    assert (server.modules, server.stopped) == (DEFAULT_PRELOAD, 0)
    handler.shutdown()
    assert server.stopped == 1


def test_collected_handler_stops_its_fork_server(
    servers: list[FakeForkServer], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHON_EXEC", "muster-python")
    made()
    gc.collect()
    assert servers[0].stopped == 1


@pytest.mark.parametrize("program", ["", "/usr/bin/python", "muster-python-3"])
def test_agent_has_no_fork_server_for_another_python(
    servers: list[FakeForkServer], monkeypatch: pytest.MonkeyPatch, program: str
):
    monkeypatch.setenv("PYTHON_EXEC", program)
    made()
    assert servers == []


def test_agent_goes_without_a_fork_server_that_cannot_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(name: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fork_server, "make_socket_folder", fail)
    monkeypatch.setenv("PYTHON_EXEC", "muster-python")
    with caplog.at_level(logging.WARNING):
        made()
    assert "workers start without preloaded modules" in caplog.text
    assert SOCKET_VARIABLE not in os.environ


def test_handler_is_not_created_with_invalid_names_of_modules(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHON_EXEC", "muster-python")
    monkeypatch.setenv("MUSTER_PRELOAD", "torch transformers")
    with pytest.raises(ValueError, match=r"MUSTER_PRELOAD = torch transformers: 'torch transformers' is not"):
        made()
