"""By which names the HTTP port may be called, and what pages of other sites may ask of it."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from muster.service.web.hosts import known_hosts

Client = TestClient[web.Request, web.Application]


@asynccontextmanager
async def site(names: Collection[str], *, checks_unnamed: bool) -> AsyncIterator[Client]:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text="runs")

    application = web.Application(middlewares=[known_hosts(names, checks_unnamed=checks_unnamed)])
    application.router.add_get("/", page)
    async with TestClient(TestServer(application)) as client:
        yield client


async def answered(client: Client, **headers: str) -> int:
    async with client.get("/", headers=headers) as answer:
        assert (await answer.text() == "runs") is (answer.status == 200)
        return answer.status


LOCAL = [
    "127.0.0.1",
    "127.0.0.1:7551",
    "[::1]:7551",
    "localhost",
    "LOCALHOST.:7551",
    "muster.localhost",
    "10.1.2.3",
]
FOREIGN = [
    "evil.example:7551",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "",
    "[::1",
    "127.0.0.1@evil.example",
]


@pytest.mark.parametrize("host", LOCAL)
async def test_addresses_and_localhost_are_known_to_a_loopback_port(host: str):
    async with site((), checks_unnamed=True) as client:
        assert await answered(client, Host=host) == 200


@pytest.mark.parametrize("host", FOREIGN)
async def test_name_that_another_site_may_have_given_the_address_is_refused(host: str):
    async with site((), checks_unnamed=True) as client:
        assert await answered(client, Host=host) == 421


async def test_names_that_are_given_are_known_and_no_others():
    async with site(("muster.example", "Status."), checks_unnamed=False) as client:
        for host in ("muster.example:443", "status", "10.1.2.3"):
            assert await answered(client, Host=host) == 200
        assert await answered(client, Host="evil.example") == 421


async def test_port_of_other_machines_without_names_takes_any():
    async with site((), checks_unnamed=False) as client:
        assert await answered(client, Host="muster.training.svc:7551") == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:7551", 200),
        ("http://evil.example", 403),
        ("http://127.0.0.1:8080", 403),
        ("null", 403),
        ("", 403),
    ],
)
async def test_page_of_another_site_is_refused(origin: str, status: int):
    async with site((), checks_unnamed=True) as client:
        assert await answered(client, Host="127.0.0.1:7551", Origin=origin) == status
