"""The HTTP port's connections are bounded in number, and in silence."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from muster.service.web.connections import BoundedSite


@asynccontextmanager
async def port(max_connections: int, silence: float = 60) -> AsyncIterator[int]:
    runner = web.AppRunner(web.Application(), access_log=None, keepalive_timeout=silence)
    await runner.setup()
    site = BoundedSite(runner, "127.0.0.1", 0, max_connections=max_connections)
    await site.start()
    assert site.name == "http://127.0.0.1:0"
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
