"""The HTTP port, over a real socket."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from lab import scenes
from muster.service.web import response_cache
from muster.service.web.site import build_site

Client = TestClient[web.Request, web.Application]


class Readiness:
    def __init__(self) -> None:
        self.why_not: str | None = None

    def __call__(self) -> str | None:
        return self.why_not


@pytest.fixture
def readiness() -> Readiness:
    return Readiness()


@pytest.fixture
async def client(readiness: Readiness) -> AsyncIterator[Client]:
    registry = CollectorRegistry()
    Counter("muster_things", "Things.", registry=registry).inc(3)
    scene = scenes.Scene()
    async with TestClient(TestServer(build_site(lambda: registry, readiness, scene, scene.ask))) as client:
        yield client


async def test_metrics_are_in_the_text_format_that_prometheus_reads(client: Client):
    answer = await client.get("/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    (things, *_) = text_string_to_metric_families(await answer.text())
    assert (things.name, things.type, things.documentation) == ("muster_things", "counter", "Things.")
    assert things.samples[0].value == 3


async def test_metrics_are_in_openmetrics_if_the_client_accepts_openmetrics(client: Client):
    answer = await client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
    assert (await answer.text()).endswith("# EOF\n")


class Scraped:
    """Says in which thread it is taken, and in which it is collected."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.collected: list[int] = []

    def __call__(self) -> Collector:
        self.taken.append(threading.get_ident())
        return self

    def collect(self) -> Iterator[Metric]:
        self.collected.append(threading.get_ident())
        yield GaugeMetricFamily("muster_looks", "Looks.", value=len(self.taken))


@pytest.fixture
def scraped() -> Scraped:
    return Scraped()


@pytest.fixture
async def scraper(
    readiness: Readiness, scraped: Scraped, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Client]:
    monkeypatch.setattr(response_cache, "FRESH_FOR", 600.0)
    scene = scenes.Scene()
    async with TestClient(TestServer(build_site(scraped, readiness, scene, scene.ask))) as scraper:
        yield scraper


async def test_metrics_are_taken_on_the_loop_and_encoded_beside_it(scraper: Client, scraped: Scraped):
    assert (await scraper.get("/metrics")).status == 200
    here = threading.get_ident()
    assert scraped.taken == [here]
    assert len(scraped.collected) == 1
    assert scraped.collected != [here]


async def test_concurrent_scrapes_collect_the_metrics_once(scraper: Client, scraped: Scraped):
    said = await asyncio.gather(*(scraper.get("/metrics") for _ in range(20)))
    assert {await one.text() for one in said} == {await (await scraper.get("/metrics")).text()}
    assert len(scraped.taken) == 1


async def test_each_format_is_an_answer_of_its_own(scraper: Client, scraped: Scraped):
    openmetrics = {"Accept": "application/openmetrics-text; version=1.0.0"}
    said = [await (await scraper.get("/metrics", headers=one)).text() for one in ({}, openmetrics) * 2]
    assert [text.endswith("# EOF\n") for text in said] == [False, True] * 2
    assert len(scraped.taken) == 2


@pytest.mark.parametrize("version", ["1.0.1", "7.7.7", "abc", ""])
async def test_the_version_that_a_client_names_makes_no_answer_of_its_own(
    scraper: Client, scraped: Scraped, version: str
):
    for one in ("1.0.0", version):
        accept = f"application/openmetrics-text; version={one}"
        answer = await scraper.get("/metrics", headers={"Accept": accept})
        assert (answer.status, (await answer.text()).endswith("# EOF\n")) == (200, True)
    assert len(scraped.taken) == 1


async def test_metrics_are_gzipped_if_the_client_accepts_gzip(scraper: Client):
    plain, zipped = [
        await scraper.get("/metrics", headers={"Accept-Encoding": encoding})
        for encoding in ("identity", "gzip")
    ]
    assert "Content-Encoding" not in plain.headers
    assert zipped.headers["Content-Encoding"] == "gzip"
    assert await zipped.text() == await plain.text()


@pytest.mark.parametrize("accept", ["", "*/*", "text/html;q=0.9", "nonsense;;;=", "x" * 4000])
async def test_any_accept_header_is_answered(client: Client, accept: str):
    answer = await client.get("/metrics", headers={"Accept": accept})
    assert answer.status == 200


async def test_it_is_alive_and_ready(client: Client):
    for path in ("/healthz", "/readyz"):
        answer = await client.get(path)
        assert (answer.status, await answer.text()) == (200, "ok\n")


async def test_when_it_is_not_ready_it_says_why_and_is_still_alive(client: Client, readiness: Readiness):
    readiness.why_not = "draining"
    answer = await client.get("/readyz")
    assert (answer.status, await answer.text()) == (503, "not ready: draining\n")
    assert (await client.get("/healthz")).status == 200
    assert (await client.get("/metrics")).status == 200
    readiness.why_not = None
    assert (await client.get("/readyz")).status == 200


async def test_probes_may_ask_with_head(client: Client, readiness: Readiness):
    assert (await client.head("/readyz")).status == 200
    readiness.why_not = "draining"
    assert (await client.head("/readyz")).status == 503


async def test_nothing_else_is_there_and_nothing_can_be_posted(client: Client):
    assert (await client.get("/nothing")).status == 404
    assert (await client.post("/metrics", data=b"x")).status == 405
