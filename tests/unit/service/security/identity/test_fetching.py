"""Getting keys over HTTP: with our token and to a server that is known, in time, and not too much."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from lab.authority import Authority
from muster.service.security.identity import fetching
from muster.service.security.identity.fetching import FetchError, fetch
from muster.service.security.identity.rules import FetchedFrom

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[..., Awaitable[str]]
TOKEN = "token-of-the-coordinator-0123456789"


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serves with a handler, and says where."""
    runners = []

    async def start(handler: Handler, tls: ssl.SSLContext | None = None) -> str:
        site = web.Application()
        site.router.add_get("/jwks", handler)
        runner = web.AppRunner(site)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        return f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}/jwks"

    yield start
    for runner in runners:
        await runner.cleanup()


async def why(source: FetchedFrom) -> str:
    with pytest.raises(FetchError) as caught:
        await fetch(source)
    assert TOKEN not in str(caught.value)
    return str(caught.value)


async def test_fetch_reads_the_token_again_and_checks_the_authority(serve: Serve, tmp_path: Path):
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pair.cert, pair.key)
    shown = []

    async def answer(request: web.Request) -> web.Response:
        shown.append(request.headers.get("Authorization"))
        return web.Response(body=b"keys")

    file = tmp_path / "token"
    source = FetchedFrom(url=await serve(answer, tls), ca_file=authority.ca, token_file=file)
    assert "cannot be read" in await why(source)
    for token in (TOKEN, f"{TOKEN}-2"):
        file.write_text(f"{token}\n")
        assert await fetch(source) == b"keys"
    assert shown == [f"Bearer {TOKEN}", f"Bearer {TOKEN}-2"]
    other = Authority(tmp_path, "other")
    assert "certificate verify failed" in await why(FetchedFrom(url=source.url, ca_file=other.ca))
    assert "certificate verify failed" in await why(FetchedFrom(url=source.url))
    assert "no certificates in PEM" in await why(FetchedFrom(url=source.url, ca_file=file))
    assert len(shown) == 2
    file.write_text(f"{TOKEN} \x01")
    assert "holds no token" in await why(source)


async def test_refused_fetch_names_missing_settings_and_follows_no_redirect(serve: Serve, tmp_path: Path):
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=403)

    async def lead_away(_: web.Request) -> web.Response:
        raise web.HTTPFound("/jwks")

    assert "answers 403 Forbidden: is token_file given" in await why(FetchedFrom(url=await serve(refuse)))
    assert "answers 302 Found" in await why(FetchedFrom(url=await serve(lead_away)))


async def test_fetch_has_limits_of_time_and_size(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    ended = asyncio.Event()

    async def hold(_: web.Request) -> web.Response:
        await ended.wait()
        return web.Response()

    async def flood(_: web.Request) -> web.Response:
        return web.Response(body=b"x" * (fetching.MAX_BYTES + 1))

    assert "more than 1,048,576 bytes" in await why(FetchedFrom(url=await serve(flood)))
    monkeypatch.setattr(fetching, "TIMEOUT", 0.05)
    assert "did not answer within 0.05 s" in await why(FetchedFrom(url=await serve(hold)))
    ended.set()


async def test_unreachable_process_is_named():
    said = await why(FetchedFrom(url="http://127.0.0.1:1/jwks"))
    assert said.startswith("http://127.0.0.1:1/jwks cannot be reached: ")
