"""The HTTP port of a replica that does not lead."""

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry, Gauge

from muster.service.web.standby import build_standby_site
from muster.v1 import coordinator_pb2

OWN, LEADER = "a:7550", "b:7550<script>"


class FakeReplica:
    """What the replica knows, as a test says."""

    def __init__(self) -> None:
        self.record = SimpleNamespace(address=OWN)
        self.leader = LEADER
        self.trouble: str | None = None

    def leader_elsewhere(self) -> str:
        return self.leader

    def addresses(self) -> list[str]:
        return [OWN, LEADER]

    def replicas(self) -> list[coordinator_pb2.Replica]:
        return [
            coordinator_pb2.Replica(address=one, version="0.2.0", leads=one == self.leader)
            for one in self.addresses()
        ]


@pytest.fixture
def fake() -> FakeReplica:
    return FakeReplica()


@pytest.fixture
async def client(fake: FakeReplica) -> AsyncIterator[TestClient[Any, Any]]:
    registry = CollectorRegistry()
    Gauge("muster_leader", "Whether.", registry=registry).set(0)
    replica: Any = fake
    site = build_standby_site(replica, fake.replicas, lambda: registry, lambda: fake.trouble)
    async with TestClient(TestServer(site)) as client:
        yield client


async def test_standby_page_names_the_leader_and_lists_the_replicas(
    client: TestClient[Any, Any], fake: FakeReplica
):
    answer = await client.get("/")
    page = await answer.text()
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert answer.headers["Cache-Control"] == "no-store"
    assert f"<code>{OWN}</code> does not lead" in page
    assert "b:7550&lt;script&gt;" in page
    assert "<script>" not in page.replace('<script src="static/app.js" defer>', "")
    assert "stands by" in page
    fake.leader = ""
    fake.trouble = "no member of etcd answered"
    page = await (await client.get("/")).text()
    assert "Nobody leads at this moment." in page
    assert "It could not take over now: no member of etcd answered" in page


async def test_json_view_of_a_standby_says_the_same(client: TestClient[Any, Any], fake: FakeReplica):
    found = json.loads(await (await client.get("/status.json")).text())
    assert found == {"standby": OWN, "leader": LEADER, "replicas": [OWN, LEADER], "trouble": None}


async def test_it_is_ready_when_it_could_take_over(client: TestClient[Any, Any], fake: FakeReplica):
    answer = await client.get("/readyz")
    assert (answer.status, await answer.text()) == (200, "ok: standing by\n")
    fake.trouble = "its lease was lost"
    answer = await client.get("/readyz")
    assert (answer.status, await answer.text()) == (503, "not ready: its lease was lost\n")
    assert (await client.get("/healthz")).status == 200


async def test_it_has_no_page_of_a_run(client: TestClient[Any, Any]):
    for path in ("/runs/job1", "/runs/job1/stacks"):
        assert (await client.get(path)).status == 404


async def test_its_metrics_are_there(client: TestClient[Any, Any]):
    assert "muster_leader 0.0" in await (await client.get("/metrics")).text()
