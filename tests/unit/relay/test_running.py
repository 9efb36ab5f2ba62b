"""A relay from its parts."""

import os
import socket
from pathlib import Path

import pytest

from muster.relay.counts import Counts
from muster.relay.listening import listen_at
from muster.relay.running import RelayConfig, start


def config(path: Path) -> RelayConfig:
    return RelayConfig(listen=listen_at(f"unix://{path}"), upstream="127.0.0.1:1", version="0")


async def test_its_socket_is_there_for_as_long_as_it_runs(tmp_path: Path):
    path = tmp_path / "s"
    relay = await start(config(path), Counts())
    assert path.is_socket()
    await relay.stop(0)
    assert not path.exists()


async def test_of_one_that_cannot_begin_no_socket_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "s"

    def refuse(*_: object) -> None:
        assert path.is_socket()
        raise PermissionError("not yours")

    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(PermissionError):
        await start(config(path), Counts())
    assert not path.exists()


def test_it_is_named_after_its_host_and_process(tmp_path: Path):
    assert config(tmp_path / "s").name == f"{socket.gethostname()}:{os.getpid()}"
