"""A relay's server: its socket, its name and its gRPC options."""

import os
import socket
from pathlib import Path

import grpc
import pytest

from muster.relay.listen_address import parse_listen_address
from muster.relay.server import RelayConfig, RelayServer, start
from muster.relay.stats import RelayStats
from muster.service.core.vocabulary.limits import Limits
from muster.service.rpc.server import options as coordinators
from muster.serving.keepalive import keepalive_within
from muster.serving.options import HANDSHAKE_TIMEOUT_MS


def config(path: Path) -> RelayConfig:
    return RelayConfig(listen=parse_listen_address(f"unix://{path}"), upstream="127.0.0.1:1", version="0")


async def test_socket_exists_while_relay_runs(tmp_path: Path):
    path = tmp_path / "s"
    relay = await start(config(path), RelayStats())
    assert path.is_socket()
    await relay.stop(0)
    assert not path.exists()


async def test_relay_that_cannot_start_leaves_no_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "s"

    def refuse(*_: object) -> None:
        assert path.is_socket()
        raise PermissionError("not yours")

    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(PermissionError):
        await start(config(path), RelayStats())
    assert not path.exists()


def test_relay_is_named_after_its_host_and_process(tmp_path: Path):
    assert config(tmp_path / "s").name == f"{socket.gethostname()}:{os.getpid()}"


def test_relay_takes_the_servers_options_of_the_coordinator(monkeypatch: pytest.MonkeyPatch):
    taken: list[dict[str, int]] = []

    class Server:
        def __init__(self, options: list[tuple[str, int]], **_: object) -> None:
            taken.append(dict(options))

        def add_generic_rpc_handlers(self, _: object) -> None: ...

    monkeypatch.setattr(grpc.aio, "server", Server)
    listen = parse_listen_address("unix:///s")
    settings = RelayConfig(
        listen=listen, upstream="127.0.0.1:1", version="0", max_connections=7, max_message_bytes=8
    )
    RelayServer(settings, RelayStats())
    (options,) = taken
    assert options["grpc.max_allowed_incoming_connections"] == 7
    assert options["grpc.max_receive_message_length"] == 8
    assert options.keys() == {name for name, _ in coordinators(keepalive_within(10.0, 3.0), Limits(), 7)}
    assert options["grpc.server_handshake_timeout_ms"] == HANDSHAKE_TIMEOUT_MS
