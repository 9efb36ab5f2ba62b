"""The newest connections of an address beyond its limit are ended, and no others."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from muster.serving.connection_limit import ConnectionLimit


class Server:
    """A listening socket, and what it has accepted."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port: int = self.listening.getsockname()[1]
        self.accepted: list[socket.socket] = []

    def connect(self, source: str) -> socket.socket:
        """Return the client's end of an accepted connection."""
        address = ("127.0.0.1", self.port)
        client = socket.create_connection(address, source_address=(source, 0))
        self._stack.enter_context(client)
        self.accepted.append(self._stack.enter_context(self.listening.accept()[0]))
        return client


@pytest.fixture
def server() -> Iterator[Server]:
    with ExitStack() as stack:
        yield Server(stack)


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True


def ignore(address: str, count: int) -> None: ...


def test_newest_connections_of_an_address_are_ended(server: Server):
    limit = ConnectionLimit(server.port, 2, ignore)
    clients = [server.connect("127.0.0.2") for _ in range(2)]
    other = server.connect("127.0.0.3")
    assert limit.look() == {}
    clients += [server.connect("127.0.0.2") for _ in range(2)]
    assert limit.look() == {"127.0.0.2": 2}
    assert [is_open(client) for client in clients] == [True, True, False, False]
    assert is_open(other)


def test_connection_that_has_gone_leaves_its_place(server: Server):
    limit = ConnectionLimit(server.port, 1, ignore)
    server.connect("127.0.0.2")
    assert limit.look() == {}
    server.accepted.pop().close()
    again = server.connect("127.0.0.2")
    assert limit.look() == {}
    assert is_open(again)


def test_connections_of_other_ports_do_not_count(server: Server):
    limit = ConnectionLimit(server.port + 1, 1, ignore)
    clients = [server.connect("127.0.0.2") for _ in range(3)]
    assert limit.look() == {}
    assert all(map(is_open, clients))


async def test_limit_is_kept_and_told(server: Server):
    shed: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
    limit = ConnectionLimit(server.port, 1, lambda address, count: shed.set_result((address, count)))
    clients = [server.connect("127.0.0.2") for _ in range(2)]
    keeping = asyncio.create_task(limit.keep())
    assert await shed == ("127.0.0.2", 1)
    keeping.cancel()
    assert [is_open(client) for client in clients] == [True, False]
