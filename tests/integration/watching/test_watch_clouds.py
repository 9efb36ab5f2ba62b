"""A watcher process between a cloud's metadata server and a coordinator, both on loopback."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.patience import until
from lab.processes.coordinator import free_port
from lab.processes.watcher import Watcher
from lab.watching.metadata import FakeAws, FakeAzure, FakeGoogle, FakeMetadataServer, answers
from muster.v1.run_pb2 import DrainNodeRequest
from tests.support.watching import drains as coordinators
from tests.support.watching.drains import Drains

INTERVAL = "--interval=0.1"


@pytest.fixture
def drains() -> Iterator[Drains]:
    with coordinators.listening() as listening:
        listening.runs = ["job1"]
        yield listening


def watcher(folder: Path, drains: Drains, source: str, server: FakeMetadataServer, *extra: str) -> Watcher:
    # A proxy must never hear of the metadata server.
    environment = os.environ | {"HTTP_PROXY": f"http://127.0.0.1:{free_port()}", "NO_PROXY": ""}
    extra = (f"--metadata-url={server.base}", INTERVAL, *extra)
    return Watcher(folder, drains.endpoint, "node-1", source, extra=extra, environment=environment)


def heard(drains: Drains, kind: str) -> DrainNodeRequest:
    """Wait for the request for a notice, and return it."""
    found: list[DrainNodeRequest] = []

    def arrived() -> bool:
        found[:] = [
            one.request for one in drains.heard if one.request.notice_id.startswith(f"{kind}/node-1/")
        ]
        return bool(found)

    drains.wait_for(arrived)
    assert found[0].node_name == "node-1"
    return found[0]


def interrupt_aws(server: FakeMetadataServer) -> None:
    assert isinstance(server, FakeAws)
    server.interrupt(seconds=120)


def preempt_on_google(server: FakeMetadataServer) -> None:
    assert isinstance(server, FakeGoogle)
    server.preempt()


def evict_on_azure(server: FakeMetadataServer) -> None:
    assert isinstance(server, FakeAzure)
    server.schedule("Preempt", seconds=30)


@pytest.mark.parametrize(
    ("source", "make", "happens", "kind", "seconds"),
    [
        pytest.param("aws", FakeAws, interrupt_aws, "aws/spot", 120, id="aws"),
        pytest.param("google", FakeGoogle, preempt_on_google, "google/preempted", 30, id="google"),
        pytest.param("azure", FakeAzure, evict_on_azure, "azure/preempt", 30, id="azure"),
    ],
)
def test_end_of_a_spot_node_is_heard_with_its_deadline_and_withdrawn(
    source: str,
    make: type[FakeMetadataServer],
    happens: Callable[[FakeMetadataServer], None],
    kind: str,
    seconds: float,
    drains: Drains,
    tmp_path: Path,
):
    with make() as server, watcher(tmp_path, drains, source, server) as one:
        before = dict(server.documents)
        happens(server)
        request = heard(drains, kind)
        assert request.stop
        assert 0 < request.deadline_ms <= seconds * 1000
        until(lambda: "asked to save: job1" in one.log)
        server.documents = before
        until(lambda: "notice.withdrawn" in one.log)
        assert one.stop() == 0


def test_advice_saves_without_a_stop_and_events_wait_for_their_lead(drains: Drains, tmp_path: Path):
    with FakeAws() as server, watcher(tmp_path, drains, "aws", server, "--lead=60") as one:
        server.schedule(seconds=600, EventId="later")
        server.schedule(seconds=50, EventId="soon")
        server.recommend_rebalance()
        assert not heard(drains, "aws/rebalance").stop
        assert heard(drains, "aws/scheduled").stop
        until(lambda: one.metric('muster_watcher_notices_in_force{source="aws"}') == 2)
    assert not any("later" in notice for notice in drains.ids())


def test_server_that_breaks_is_logged_once_and_its_notice_stays(drains: Drains, tmp_path: Path):
    with FakeAzure() as server, watcher(tmp_path, drains, "azure", server) as one:
        server.schedule("Terminate")
        heard(drains, "azure/terminate")
        server.faults[server.EVENTS] = answers(500)
        asked = len(server.asked)
        until(lambda: len(server.asked) > asked + 5)
        assert one.metric('muster_watcher_notices_in_force{source="azure"}') == 1
        assert one.log.count("answers 500") == 1
        del server.faults[server.EVENTS]
        until(lambda: "answers again" in one.log)
    assert len(drains.ids()) == 1
