"""The certificates and names of replicas, for every client."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from lab.authority import Authority
from lab.processes.coordinator import Coordinator
from muster.worker import ConnectError
from tests.support.replica_clients import CLIENTS, WITHIN
from tests.support.standby import Address, Standby

pytestmark = pytest.mark.usefixtures("no_known_addresses")


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    made = Authority(tmp_path)
    monkeypatch.setenv("MUSTER_TLS_CA", str(made.ca))
    return made


def secured(folder: Path, authority: Authority, *hosts: str) -> Coordinator:
    """A coordinator whose certificate is for these names alone."""
    pair = authority.issue("leader", *hosts)
    (folder / "leader").mkdir()
    extra = (f"--tls-cert={pair.cert}", f"--tls-key={pair.key}")
    return Coordinator(folder / "leader", state="memory:", extra=extra)


@pytest.mark.parametrize("client", CLIENTS)
def test_learned_address_shows_a_certificate_of_the_endpoints_host(
    tmp_path: Path, authority: Authority, client: Callable[[str], None]
):
    """The address of the leader is 127.0.0.1, which its certificate does not name."""
    pair = authority.issue("standby", "localhost")
    server = grpc.ssl_server_credentials([(pair.key.read_bytes(), pair.cert.read_bytes())])
    with (
        secured(tmp_path, authority, "localhost") as leader,
        Standby(leader.endpoint, credentials=server) as standby,
    ):
        client(f"localhost:{standby.port}")
        assert standby.asked, "its certificate is for localhost alone, and was taken"


@pytest.mark.parametrize("within", WITHIN)
def test_replica_with_a_certificate_for_another_name_is_rejected(
    tmp_path: Path, authority: Authority, within: Callable[[str, float], None]
):
    with (
        secured(tmp_path, authority, "localhost") as leader,
        Address() as dead,
        pytest.raises(ConnectError, match="the coordinator's certificate is for another name than the"),
    ):
        within(f"{leader.endpoint},{dead.endpoint}", 3.0)


@pytest.mark.parametrize("client", CLIENTS)
def test_the_name_in_the_environment_wins_at_every_replica(
    tmp_path: Path, authority: Authority, client: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MUSTER_TLS_SERVER_NAME", "muster.example")
    with secured(tmp_path, authority, "muster.example") as leader, Address() as dead:
        client(f"{dead.endpoint},{leader.endpoint}")


@pytest.mark.parametrize("client", CLIENTS)
def test_certificate_is_checked_for_the_name_that_has_several_addresses(
    tmp_path: Path, authority: Authority, client: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
):
    """Nobody is at the first of them."""
    name = "muster.invalid"
    with secured(tmp_path, authority, name) as leader:
        addresses = ["127.0.0.2", "127.0.0.1"]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, leader.port)) for one in addresses]
        asked = socket.getaddrinfo

        def look_up(host: str, *arguments: Any, **more: Any) -> Any:
            return found if host == name else asked(host, *arguments, **more)

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        client(f"{name}:{leader.port}")
