"""The relay of a node: on a socket of its own, done without where it cannot be, and gone at the end."""

import os
import tempfile
import threading
from pathlib import Path

import pytest

from muster.relay.listen_address import ListenError
from muster.worker.errors import MusterError
from muster.worker.node import relay as node_relay
from muster.worker.node.relay import NodeRelay, start
from muster.worker.transport import fork_guard, socket_folder
from tests.support.expect import raising

NOBODY = "127.0.0.1:1"
"""A relay calls nobody before it is called."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def path_of(relay: NodeRelay) -> Path:
    address, direct = relay.endpoint.split(",")
    assert direct == NOBODY
    return Path(address.removeprefix("unix://"))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "muster-relay"]


def claims() -> list[str]:
    """How relays use gRPC, as the fork guard sees it. Stores of other tests may still use it, too."""
    return [claim.what for claim in fork_guard._usages if claim.what == "a relay"]


def test_relay_socket_is_private_and_removed_at_the_stop(folder: Path):
    relay = start(NOBODY)
    assert relay is not None
    path = path_of(relay)
    assert path.is_socket()
    assert path.parent.parent == folder
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert threads() == ["muster-relay"]
    assert claims() == ["a relay"]
    for _ in range(2):
        relay.stop()
        assert list(folder.iterdir()) == []
        assert threads() == []
        assert claims() == []


def test_two_relays_of_one_machine_have_different_sockets(folder: Path):
    one, other = NodeRelay(NOBODY), NodeRelay(NOBODY)
    assert path_of(one) != path_of(other)
    one.stop()
    assert path_of(other).is_socket()
    other.stop()


def test_relay_uses_a_short_folder_if_the_temporary_path_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    far = tmp_path / ("x" * 100)
    far.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(far))
    relay = NodeRelay(NOBODY)
    path = path_of(relay)
    assert path.is_socket()
    assert path.parent.parent == socket_folder.SHORT
    relay.stop()
    assert not path.parent.exists()
    assert list(far.iterdir()) == []


@pytest.mark.parametrize(
    "error", [ListenError("a socket is in the way"), RuntimeError("no gRPC"), OSError(28, "No space left")]
)
def test_relay_that_cannot_start_logs_why_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
):
    monkeypatch.setattr(node_relay, "RelayThread", raising(error))
    assert start(NOBODY) is None
    (record,) = caplog.records
    assert record.getMessage() == f"this node has no relay, and its workers connect directly: {error}"
    assert list(folder.iterdir()) == []
    assert claims() == []


def test_relay_is_absent_if_no_folder_can_be_made(folder: Path, caplog: pytest.LogCaptureFixture):
    folder.rmdir()
    assert start(NOBODY) is None
    assert "No such file or directory" in caplog.text
    assert claims() == []


def test_forked_child_neither_stops_its_parents_relay_nor_has_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    relay = NodeRelay(NOBODY)
    pid = os.getpid()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: pid + 1)
        relay.stop()
        with pytest.raises(MusterError, match="which holds"):
            NodeRelay(NOBODY)
    assert path_of(relay).is_socket()
    assert len(list(folder.iterdir())) == 1
    relay.stop()
