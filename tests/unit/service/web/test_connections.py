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

from muster.service.web import connections
from muster.service.web.connections import BoundedSite
from tests.support.authority import Authority


@asynccontextmanager
async def port(
    max_connections: int, silence: float = 60, context: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    runner = web.AppRunner(web.Application(), access_log=None, keepalive_timeout=silence)
    await runner.setup()
    site = BoundedSite(runner, "127.0.0.1", 0, context, max_connections)
    await site.start()
    assert site.name == f"{'https' if context else 'http'}://127.0.0.1:0"
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def ask(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bytes:
    reader, writer = connection
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    return await reader.readline()


async def test_who_comes_beyond_the_bound_is_let_go_and_who_comes_later_is_not():
    async with port(2) as number:
        held = [await asyncio.open_connection("127.0.0.1", number) for _ in range(2)]
        for one in held:
            assert b"404" in await ask(one)
        beyond = await asyncio.open_connection("127.0.0.1", number)
        with suppress(ConnectionError):
            assert await ask(beyond) == b""
        held[0][1].close()
        await held[0][1].wait_closed()
        answered = b""
        while b"404" not in answered:
            later = await asyncio.open_connection("127.0.0.1", number)
            try:
                answered = await ask(later)
            except ConnectionError:
                continue
            finally:
                later[1].close()
        beyond[1].close()
        held[1][1].close()


async def test_a_request_that_is_never_whole_is_given_up():
    async with port(2, silence=0.2) as number:
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nX-Slow: ")
        assert await asyncio.wait_for(reader.read(), 30) == b""
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
        silent = [await asyncio.open_connection("127.0.0.1", number) for _ in range(2)]
        beyond, writer = await asyncio.open_connection("127.0.0.1", number)
        assert await asyncio.wait_for(beyond.read(), 30) == b""
        writer.close()
        for one in silent:
            one[1].close()
        answered = b""
        while b"404" not in answered:
            with suppress(ConnectionError):
                later = await asyncio.open_connection("127.0.0.1", number, ssl=asking)
                answered = await ask(later)
                later[1].close()


async def test_who_speaks_no_tls_is_let_go(tmp_path: Path):
    serving, asking = contexts(tmp_path)
    async with port(1, context=serving) as number:
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionError):
            assert b"HTTP" not in await asyncio.wait_for(reader.read(), 30)
        writer.close()
        answered = b""
        while b"404" not in answered:
            with suppress(ConnectionError):
                later = await asyncio.open_connection("127.0.0.1", number, ssl=asking)
                answered = await ask(later)
                later[1].close()


async def test_who_has_not_begun_is_let_go_at_the_end(tmp_path: Path):
    async with port(1, context=contexts(tmp_path)[0]) as number:
        silent, writer = await asyncio.open_connection("127.0.0.1", number)
        # The second one is refused, so that the first has been taken.
        reader, second = await asyncio.open_connection("127.0.0.1", number)
        assert await asyncio.wait_for(reader.read(), 30) == b""
        second.close()
    assert await asyncio.wait_for(silent.read(), 30) == b""
    writer.close()


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
