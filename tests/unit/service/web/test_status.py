"""The page and its json_views over a real socket, before a made-up coordinator."""

import asyncio
import gzip
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry
from yarl import URL

from lab import scenes
from muster.service.core.coordinator import Coordinator
from muster.service.core.vocabulary.model import Instant
from muster.service.security.access import Access
from muster.service.security.grants import Grant, Role
from muster.service.security.tokens import Tokens
from muster.service.web import links, page_data
from muster.service.web.access import guarded
from muster.service.web.site import build_site
from tests.unit.service.web.markup import Markup

T = TypeVar("T")
Client = TestClient[web.Request, web.Application]
HOSTILE = [
    "a/b",
    "..",
    ".",
    "a.json",
    "a.html",
    "/",
    "//",
    "%2e%2e",
    "%",
    "?a=b#c",
    "<script>",
    "\"'&",
    " ",
    "ש",
    "é" * 128,
]


class CountedScene(scenes.Scene):
    """Counts the looks, and holds them back if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.looked_at = asyncio.Event()
        self.may_look = asyncio.Event()
        self.may_look.set()

    async def query(self, ask: Callable[[Coordinator, Instant], T]) -> T:
        self.looks += 1
        self.looked_at.set()
        await self.may_look.wait()
        return await super().query(ask)


@pytest.fixture
async def scene() -> CountedScene:
    return CountedScene()


@pytest.fixture
async def client(scene: CountedScene) -> AsyncIterator[Client]:
    site = build_site(CollectorRegistry, lambda: None, scene, scene.ask)
    async with TestClient(TestServer(site)) as client:
        yield client


PATHS = [
    "/",
    "/status.json",
    "/runs/job1",
    "/runs/job1.html",
    "/runs/job1.json",
    "/runs/job1/stacks",
    "/runs/job1/stacks.json",
    "/static/app.css",
    "/static/app.js",
    "/static/icon.svg",
    "/favicon.ico",
    "/runs/unknown",
    "/runs/unknown/stacks",
]


@pytest.mark.parametrize("path", PATHS)
async def test_every_answer_is_guarded(client: Client, scene: CountedScene, path: str):
    scenes.Job(scene, "job1", 8)
    answer = await client.get(path)
    assert answer.status == (404 if "unknown" in path else 200)
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'; ")
    assert "unsafe" not in answer.headers["Content-Security-Policy"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert "Set-Cookie" not in answer.headers


@pytest.mark.parametrize("path", PATHS)
async def test_it_can_be_read_and_nothing_else(client: Client, path: str):
    assert (await client.head("/")).status == 200
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert (await client.request(method, path)).status == 405


LOOKS = ["/", "/status.json", "/runs/job1", "/runs/job1.json", "/runs/job1/stacks", "/runs/job1/stacks.json"]


@pytest.mark.parametrize("path", LOOKS)
async def test_a_coordinator_that_has_retired_tells_nothing(client: Client, scene: CountedScene, path: str):
    scenes.Job(scene, "job1", 2)
    assert (await client.get(path)).status == 200
    scene.retired = True
    answer = await client.get(path)
    assert answer.status == 503, "not what was told a moment ago, for another one may decide"
    assert "the coordinator is stopping" in await answer.text()


@pytest.mark.parametrize("path", LOOKS)
async def test_request_during_retirement_is_answered_with_503(client: Client, scene: CountedScene, path: str):
    scene.may_look.clear()
    looking = asyncio.ensure_future(client.get(path))
    await scene.looked_at.wait()
    scene.retired = True
    scene.may_look.set()
    assert (await looking).status == 503


async def test_a_viewer_sees_the_runs_that_its_token_is_for(scene: CountedScene):
    scenes.Job(scene, "a-1", 2)
    scenes.Job(scene, "b-1", 2)
    tokens = {
        "*": "s3cr3t-of-all-0123456789",
        "a-*": "s3cr3t-of-a-0123456789",
        "c-*": "s3cr3t-of-c-0123456789",
    }
    grants = [
        Grant(name=runs, role=Role.VIEWER, runs=(runs,), digest=hashlib.sha256(token.encode()).digest())
        for runs, token in tokens.items()
    ]
    site = build_site(CollectorRegistry, lambda: None, scene, scene.ask)
    site.middlewares.append(
        guarded(Access(lambda: Tokens(tuple(grants))), needs_certificate=False, knows_operators=True)
    )
    async with TestClient(TestServer(site)) as client:
        for runs, seen in (("*", {"a-1", "b-1"}), ("a-*", {"a-1"}), ("c-*", set())):
            headers = {"Authorization": f"Bearer {tokens[runs]}"}
            page = await (await client.get("/", headers=headers)).text()
            document = await (await client.get("/status.json", headers=headers)).json()
            assert {run["run_id"] for run in document["runs"]} == seen
            assert {run for run in ("a-1", "b-1") if run in page} == seen
            assert (f"Only the runs that your token is for: {runs}" in page) == (runs != "*")


async def test_nothing_comes_from_elsewhere(client: Client, scene: CountedScene):
    scenes.Job(scene, "job1", 8)
    for path in ("/", "/runs/job1"):
        page = Markup(await (await client.get(path)).text())
        for value in [*page.of("href"), *page.of("src")]:
            assert not URL(value).absolute
            target = client.make_url(path).join(URL(value))
            assert (await client.get(target.relative())).status == 200
        assert not any(tag == "style" for tag, *_ in page.skeleton)
        assert ("script", "src", "defer") in page.skeleton
        assert sum(tag == "script" for tag, *_ in page.skeleton) == 1
    for name in ("app.css", "app.js", "icon.svg"):
        text = await (await client.get(f"/static/{name}")).text()
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "url(" not in text
        assert "@import" not in text


@pytest.mark.parametrize("run_id", HOSTILE)
async def test_a_run_of_any_name_is_found(client: Client, scene: CountedScene, run_id: str):
    scenes.Job(scene, run_id, 8)
    page = await client.get(URL(f"/{links.run_page(run_id)}", encoded=True))
    assert (page.status, page.content_type) == (200, "text/html")
    document = await client.get(URL(f"/{links.run_json(run_id)}", encoded=True))
    assert (document.status, document.content_type) == (200, "application/json")
    assert (await document.json())["run"]["run_id"] == run_id


async def test_a_run_that_is_not_known_is_said_so(client: Client):
    page = await client.get("/runs/%3Cb%3E")
    assert page.status == 404
    assert "RUN_NOT_FOUND" in Markup(await page.text()).text
    document = await client.get("/runs/%3Cb%3E.json")
    assert document.status == 404
    assert (await document.json())["error"]["reason"] == "RUN_NOT_FOUND"


async def test_a_path_that_is_no_text_finds_nothing(client: Client):
    assert (await client.get(URL("/runs/%ff%fe", encoded=True))).status == 404


async def test_a_hundred_viewers_cost_what_one_does(client: Client, scene: CountedScene):
    scenes.Job(scene, "job1", 8)
    scene.may_look.clear()
    viewers = [asyncio.create_task(client.get("/runs/job1")) for _ in range(100)]
    gone = asyncio.create_task(client.get("/runs/job1"))
    await scene.looked_at.wait()
    gone.cancel()
    scene.may_look.set()
    answers = {await answer.read() for answer in await asyncio.gather(*viewers)}
    assert (len(answers), scene.looks) == (1, 1)
    await client.get("/runs/job1.json")
    assert scene.looks == 2, "the JSON view is another response"


async def test_page_is_gzipped_if_the_client_accepts_gzip(client: Client, scene: CountedScene):
    scenes.Job(scene, "job1", 8)
    plain = await client.get("/runs/job1", headers={"Accept-Encoding": "identity"})
    assert "Content-Encoding" not in plain.headers
    zipped = await client.get("/runs/job1", headers={"Accept-Encoding": "gzip"}, auto_decompress=False)
    assert zipped.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(await zipped.read()) == await plain.read()
    assert "no-store" in plain.headers["Cache-Control"]


async def test_json_view_of_a_run_has_the_fields_of_the_wire(client: Client):
    sixteen = scenes.sixteen()
    site = build_site(CollectorRegistry, lambda: None, sixteen, sixteen.ask)
    async with TestClient(TestServer(site)) as client:
        shown = json.loads(await (await client.get("/status.json")).text())
        run = json.loads(await (await client.get("/runs/llama-70b.json")).text())
    assert set(shown) == {"taken_at", "version", "epoch", "runs", "barriers"}
    assert [one["run_id"] for one in shown["runs"]] == ["llama-70b", "vit-small", "vit-sweep-3"]
    assert shown["runs"][2]["closed"]["by"] == "ann@desk"
    first = shown["barriers"][0]
    assert (first["prefix"], first["sequence"], first["arrived"], first["required"]) == (
        "checkpoint",
        "2",
        14,
        16,
    )
    assert [one["rank"] for one in first["missing"]] == [6, 11]
    assert first["missing"][1]["state"] == "MISSING_STATE_CONNECTION_LOST"
    assert set(run) == {"taken_at", "run", "rendezvous", "members", "barriers"}
    assert [one["rank"] for one in run["members"]] == list(range(16))
    assert run["members"][11]["state"] == "MEMBER_STATE_DISCONNECTED"
    assert len(run["rendezvous"]["nodes"]) == 2
    outcomes = [one["decision"]["outcome"] for one in run["barriers"] if "decision" in one]
    assert outcomes == ["OUTCOME_RELEASED"] * 4


async def test_json_view_of_a_run_has_its_local_checkpoints():
    scene = scenes.local()
    site = build_site(CollectorRegistry, lambda: None, scene, scene.ask)
    async with TestClient(TestServer(site)) as client:
        shown = json.loads(await (await client.get("/runs/llama-8b.json")).text())["local"]
    assert [(one["checkpoint"]["step"], one["level"]) for one in shown["checkpoints"]] == [
        ("320", "DURABILITY_LEVEL_LOCAL"),
        ("310", "DURABILITY_LEVEL_REPLICATED"),
        ("300", "DURABILITY_LEVEL_PERSISTED"),
    ]
    assert [one["keeper"]["node_name"] for one in shown["keepers"]] == [f"gpu-d{n}" for n in range(4)]


async def test_json_view_names_missing_ranks_of_bounded_decisions(
    client: Client, scene: CountedScene, monkeypatch: pytest.MonkeyPatch
):
    job = scenes.Job(scene, "job1", 16)
    job.join("checkpoint")
    for sequence in range(3):
        job.meet("checkpoint", sequence, without=(3, 4), timeout=10)
        scene.wait(11)
    monkeypatch.setattr(page_data, "MAX_MISSING", 5)
    shown = await (await client.get("/runs/job1.json")).json()
    assert [one["sequence"] for one in shown["barriers"]] == ["2", "1"]
