"""Access checks of the HTTP port, over a real socket."""

import base64
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from muster.service.security.access import Access
from muster.service.security.grants import Grant, Role
from muster.service.security.tokens import Tokens
from muster.service.web import links
from muster.service.web.access import guarded
from muster.service.web.request_grant import GRANT

Client = TestClient[web.Request, web.Application]
ALL, TEAM = "s3cr3t-of-all-0123456789", "s3cr3t-of-team-0123456789"
OPERATOR = "s3cr3t-of-operator-0123456789"


def grant(token: str, *runs: str, role: Role = Role.VIEWER) -> Grant:
    digest = hashlib.sha256(token.encode()).digest()
    return Grant(name=runs[0], role=role, runs=runs, digest=digest)


TOKENS = Tokens((grant(ALL, "*"), grant(TEAM, "a-*"), grant(OPERATOR, "a-*", role=Role.OPERATOR)))


@asynccontextmanager
async def site(
    access: Access | None, *, needs_certificate: bool = False, knows_operators: bool = True
) -> AsyncIterator[Client]:
    async def show(request: web.Request) -> web.Response:
        known = request[GRANT]
        return web.Response(text=known.name if known else "everyone")

    guard = guarded(access, needs_certificate=needs_certificate, knows_operators=knows_operators)
    application = web.Application(middlewares=[guard])
    paths = "/", "/metrics", "/healthz", "/readyz", "/runs/{run}", *links.STACKS_ROUTES, "/static/app.css"
    for path in paths:
        application.router.add_get(path, show)
    async with TestClient(TestServer(application)) as client:
        yield client


async def ask(client: Client, path: str, authorization: str = "") -> tuple[int, str]:
    headers = {"Authorization": authorization} if authorization else {}
    answer = await client.get(path, headers=headers)
    return answer.status, (await answer.text()).strip()


async def test_without_tokens_everyone_may_see_everything():
    async with site(None) as client:
        for path in ("/", "/metrics", "/runs/b", "/readyz"):
            assert await ask(client, path) == (200, "everyone")


async def test_probes_need_nothing_and_everything_else_a_token():
    async with site(Access(lambda: TOKENS), needs_certificate=False) as client:
        for path in ("/healthz", "/readyz"):
            assert await ask(client, path) == (200, "everyone")
        for path in ("/", "/metrics", "/runs/a-1", "/nothing"):
            status, said = await ask(client, path)
            assert (status, "none came" in said) == (401, True)
            status, said = await ask(client, path, "Bearer other-0123456789")
            assert (status, "not one of this coordinator's" in said) == (401, True)
        answer = await client.get("/")
        assert answer.headers["WWW-Authenticate"].startswith("Bearer, Basic realm=")


async def test_a_token_is_for_its_runs_and_what_shows_all_runs_is_for_all():
    async with site(Access(lambda: TOKENS)) as client:
        for path in ("/metrics", "/runs/b"):
            assert await ask(client, path, f"Bearer {ALL}") == (200, "*")
            assert (await ask(client, path, f"Bearer {TEAM}"))[0] == 403
        for path in ("/", "/runs/a-1", "/static/app.css"):
            assert await ask(client, path, f"Bearer {TEAM}") == (200, "a-*")


async def test_whole_stacks_are_for_operators_of_the_run():
    path = "/runs/a-1/stacks"
    async with site(None) as client:
        assert await ask(client, path) == (200, "everyone")
    async with site(Access(lambda: TOKENS)) as client:
        assert (await ask(client, path))[0] == 401
        assert await ask(client, path, f"Bearer {OPERATOR}") == (200, "a-*")
        assert (await ask(client, "/runs/b/stacks", f"Bearer {OPERATOR}"))[0] == 403
        status, said = await ask(client, path, f"Bearer {ALL}")
        assert (status, said) == (
            403,
            f'token "*" has the role viewer, and {path} needs operator. Use a token of that role.',
        )


async def test_a_port_that_asks_for_less_than_the_other_shows_no_stacks():
    async with site(None, knows_operators=False) as client:
        assert await ask(client, "/runs/a-1") == (200, "everyone")
        status, said = await ask(client, "/runs/a-1/stacks")
        assert (status, "--http-tokens" in said) == (403, True)


async def test_a_browser_sends_the_token_as_a_password():
    async with site(Access(lambda: TOKENS)) as client:
        login = base64.b64encode(f"anyone:{ALL}".encode()).decode()
        assert await ask(client, "/", f"Basic {login}") == (200, "*")
        for bad in ("Basic", "Basic %%%", "Basic /w==", f"Basic {base64.b64encode(b'x').decode()}"):
            assert (await ask(client, "/", bad))[0] == 401


@pytest.mark.parametrize("path", ["/", "/runs/a-1"])
async def test_without_a_client_certificate_only_probes_are_answered(path: str):
    async with site(None, needs_certificate=True) as client:
        assert await ask(client, "/readyz") == (200, "everyone")
        status, said = await ask(client, path)
        assert (status, "asks for a client certificate" in said) == (403, True)
