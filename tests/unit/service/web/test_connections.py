"""The HTTP port's connections are bounded in number, and in silence."""

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import structlog
import structlog.testing
from aiohttp import web

from lab.authority import Authority
from lab.patience import PATIENCE
from muster.service.web import connections
from muster.service.web.connections import BoundedSite


@asynccontextmanager
async def port(
    max_connections: int,
    silence: float = 60,
    context: ssl.SSLContext | None = None,
    host: str = "127.0.0.1",
) -> AsyncIterator[int]:
    runner = web.AppRunner(web.Application(), access_log=None, keepalive_timeout=silence)
    await runner.setup()
    site = BoundedSite(runner, host, 0, context, max_connections)
    await site.start()
    assert site.name == f"{'https' if context else 'http'}://{host}:0"
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def ask(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bytes:
    """The head of an answer; what came of it, if the connection ended before."""
    reader, writer = connection
    writer.write(b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n")
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        return error.partial


async def connect(
    number: int, address: str = "127.0.0.1", context: ssl.SSLContext | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", number, local_addr=(address, 0), ssl=context)


async def close(*connections: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    for _, writer in connections:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def assert_let_go(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    with suppress(ConnectionError):
        assert await asyncio.wait_for(connection[0].read(), PATIENCE) == b""


async def test_oldest_connection_is_closed_if_a_new_connection_exceeds_the_limit():
    async with port(2) as number:
        held = [await connect(number) for _ in range(2)]
        for one in held:
            assert b"404" in await ask(one)
        newest = await connect(number)
        assert b"404" in await ask(newest)
        await assert_let_go(held[0])
        assert b"404" in await ask(held[1])
        await close(*held, newest)


async def test_the_address_that_has_most_makes_room_for_the_others():
    async with port(3) as number:
        probe = await connect(number)
        assert b"404" in await ask(probe)
        crowd = [await connect(number, "127.0.0.2") for _ in range(20)]
        for one in crowd[:-2]:
            await assert_let_go(one)
        for one in (probe, *crowd[-2:]):
            assert b"404" in await ask(one)
        await close(probe, *crowd)


async def test_a_request_that_is_never_whole_is_given_up():
    async with port(2, silence=0.2) as number:
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nX-Slow: ")
        assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
        writer.close()


def contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Those of a server and of a client."""
    authority = Authority(folder)
    pair = authority.issue("server")
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(pair.cert, pair.key)
    return serving, ssl.create_default_context(cafile=authority.ca)


async def test_a_connection_counts_before_tls_begins_on_it(tmp_path: Path):
    serving, asking = contexts(tmp_path)
    async with port(2, context=serving) as number:
        silent = [await connect(number) for _ in range(2)]
        served = await connect(number, context=asking)
        assert b"404" in await ask(served)
        await assert_let_go(silent[0])
        await close(*silent, served)


async def test_plain_http_connection_to_the_tls_port_is_closed(tmp_path: Path):
    serving, asking = contexts(tmp_path)
    async with port(1, context=serving) as number:
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionError):
            assert b"HTTP" not in await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
        answered = b""
        while b"404" not in answered:
            with suppress(ConnectionError):
                later = await asyncio.open_connection("127.0.0.1", number, ssl=asking)
                answered = await ask(later)
                later[1].close()


async def test_connection_without_a_tls_handshake_is_closed_at_shutdown(tmp_path: Path):
    async with port(1, context=contexts(tmp_path)[0]) as number:
        first, second = await connect(number), await connect(number)
        # It has made room, so the second has been taken.
        await assert_let_go(first)
    await assert_let_go(second)
    await close(first, second)


async def test_a_system_without_room_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "ACCEPT_PAUSE", 0)
    loop = asyncio.get_running_loop()
    accept, failures = (
        loop.sock_accept,
        [ConnectionAbortedError(), OSError(errno.EMFILE, "Too many open files")],
    )

    async def failing(listening: socket.socket) -> tuple[socket.socket, Any]:
        if failures:
            raise failures.pop(0)
        return await accept(listening)

    monkeypatch.setattr(loop, "sock_accept", failing)
    with structlog.testing.capture_logs() as logs:
        async with port(1) as number:
            connection = await asyncio.open_connection("127.0.0.1", number)
            assert b"404" in await ask(connection)
            connection[1].close()
    (line,) = logs
    assert (line["event"], line["log_level"]) == ("http.accept_failed", "warning")
    assert "Too many open files" in line["error"]


async def test_the_wildcard_of_ipv6_is_that_of_ipv4_as_well():
    async with port(2, host="::") as number:
        for address in ("127.0.0.1", "::1"):
            connection = await asyncio.open_connection(address, number)
            assert b"404" in await ask(connection)
            await close(connection)


async def test_client_that_reads_no_answers_is_disconnected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "SILENCE_TIMEOUT", 0.2)

    async with port(1) as number:
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        held.setblocking(False)
        with held:
            loop = asyncio.get_running_loop()
            await loop.sock_connect(held, ("127.0.0.1", number))
            asked = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
            with pytest.raises(ConnectionError):
                async with asyncio.timeout(PATIENCE):
                    while True:
                        await loop.sock_sendall(held, asked)
