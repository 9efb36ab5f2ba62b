"""Connections are found by gRPC's names of their peers, and ended."""

import asyncio
import socket

import pytest

from muster.serving.connections import address_of, end_connection


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:41822", "10.0.0.7"),
        ("ipv6:%5B::1%5D:41822", "::1"),
        ("ipv6:[2001:db8::7]:41822", "2001:db8::7"),
        ("unix:/run/muster.sock", "unix:/run/muster.sock"),
    ],
)
def test_address_of_a_peer_has_no_port(peer: str, address: str):
    assert address_of(peer) == address


@pytest.mark.parametrize(
    ("family", "host", "name"),
    [
        (socket.AF_INET, "127.0.0.1", "ipv4:127.0.0.1:{}"),
        (socket.AF_INET6, "::1", "ipv6:%5B::1%5D:{}"),
    ],
)
async def test_only_the_named_connection_is_ended(family: int, host: str, name: str):
    with socket.create_server((host, 0), family=family) as server:
        ended, other = (socket.create_connection(server.getsockname()[:2]) for _ in range(2))
        accepted = [server.accept()[0] for _ in range(2)]
        try:
            assert await end_connection(name.format(ended.getsockname()[1]))
            # The client's own socket has the same process, and another peer.
            assert ended.recv(1) == b""
            other.send(b"x")
            assert accepted[1].recv(1) == b"x"
        finally:
            for connection in (ended, other, *accepted):
                connection.close()


async def test_connection_over_ipv4_to_a_socket_for_both_versions_is_found():
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        client = socket.create_connection(("127.0.0.1", server.getsockname()[1]))
        accepted, _ = server.accept()
        with client, accepted:
            assert accepted.getpeername()[0] == "::ffff:127.0.0.1"
            assert await end_connection(f"ipv4:127.0.0.1:{client.getsockname()[1]}")
            assert client.recv(1) == b""


async def test_peer_without_a_connection_is_ignored():
    reader, writer = socket.socketpair()
    with reader, writer:
        for peer in ("unix:", "unix:/run/muster.sock", "ipv4:127.0.0.1:1"):
            assert not await asyncio.wait_for(end_connection(peer), 30)
        writer.send(b"x")
        assert reader.recv(1) == b"x"
