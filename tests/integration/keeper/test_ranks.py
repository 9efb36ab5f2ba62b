"""What ranks ask their keeper for: to attach, for notes of other ranks, and how it stands."""

import base64
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from lab.patience import until
from lab.processes.keeper import Keeper
from muster.keeper.settings import UNUSED
from muster.v1 import local_pb2 as pb
from tests.support.keeping.checkpoints import made_checkpoint
from tests.support.keeping.fake_service import FakeService
from tests.support.keeping.nodes import Nodes, order


def connected(keeper: Keeper) -> socket.socket:
    """The connection that each rank holds."""
    url = urlsplit(keeper.address["url"])
    return socket.create_connection((url.hostname, url.port))


def test_rank_is_attached_when_the_coordinator_has_heard_of_it(nodes: Nodes, service: FakeService):
    a = nodes.add("a", "--failure-domain=rack-7")
    service.stop()
    answer = a.post("/attach", generation=1, world_size=4, rank=2, replicas=1)
    assert answer.status == 503
    assert "the coordinator has not heard of this rank" in answer.said["error"]
    service.start()
    a.attach(1, 4, 2)
    a.attach(1, 4, 3)
    attachment = service.keepers[a.id].attachment
    assert (attachment.generation, attachment.world_size, list(attachment.ranks)) == (1, 4, [2, 3])
    assert service.keepers[a.id].request.keeper.failure_domain == "rack-7"


def test_rank_of_an_earlier_generation_is_refused(nodes: Nodes, service: FakeService):
    a = nodes.add("a")
    a.attach(3, 4, 2)
    answer = a.post("/attach", generation=2, world_size=4, rank=2, replicas=1)
    assert answer.status == 409
    assert "generation 2 is over" in answer.said["error"]
    a.attach(4, 2, 0)
    assert list(service.keepers[a.id].attachment.ranks) == [0]


def test_malformed_request_is_refused(nodes: Nodes, service: FakeService):
    a = nodes.add("a")
    fields = {"generation": 1, "world_size": 4, "rank": 2, "replicas": 1}
    assert a.post("/attach", **{**fields, "rank": -1}).status == 400
    assert a.post("/attach", **{**fields, "rank": True}).status == 400
    assert a.post("/attach", **{**fields, "rank": "2"}).status == 400
    assert a.post("/attach").status == 400
    assert a.post("/take", attempt="1-0", notes=[["0", "x"]]).status == 400
    assert a.post("/take", attempt="1-0", notes=7).status == 400
    assert a.post("/fetch", attempt=7, name="x").status == 404
    assert a.post("/nothing").status == 404


def test_rank_0_takes_the_notes_of_all_ranks(nodes: Nodes, service: FakeService):
    a, b = nodes.pair()
    for keeper, rank in ((a, 0), (b, 1)):
        notes = keeper.folder / "1-0" / ".notes"
        notes.mkdir(parents=True)
        (notes / f"wrote-{rank}").write_bytes(b"rank %d" % rank)
    until(lambda: a.post("/take", attempt="1-0", notes=[[1, "wrote-1"]]).status == 200)
    answer = a.post("/take", attempt="1-0", notes=[[0, "wrote-0"], [1, "wrote-1"]])
    assert [base64.b64decode(note) for note in answer.said["notes"]] == [b"rank 0", b"rank 1"]
    missing = a.post("/take", attempt="1-0", notes=[[1, "wrote-9"]])
    assert (missing.status, "rank 1" in missing.said["error"]) == (404, True)
    unknown = a.post("/take", attempt="1-0", notes=[[5, "wrote-5"]])
    assert (unknown.status, "no keeper of rank 5" in unknown.said["error"]) == (503, True)
    outside = a.post("/take", attempt="1-0", notes=[[0, "../../keeper.json"]])
    assert outside.status == 404


def test_keeper_that_no_rank_uses_any_more_ends_and_a_connected_rank_holds_it(
    nodes: Nodes, service: FakeService
):
    used, unused = (nodes.make(name, "--idle=2") for name in ("used", "unused"))
    used.start()
    with connected(used):
        unused.launch()
        assert unused.ended() == UNUSED
        assert used.runs
    assert used.ended() == UNUSED


def test_unused_keeper_stays_for_what_it_is_to_persist(nodes: Nodes, service: FakeService):
    a = nodes.add("a", "--idle=2", ranks=[0], world_size=1)
    made = made_checkpoint(world_size=1)
    with connected(a):
        made.write(a.folder, [0], head=True)
        service.push(a.id, order(made, [0], persist_to="/nowhere"))
        service.holds(a.id, made, [0])
    other = nodes.make("b", "--idle=2")
    other.launch()
    assert other.ended() == UNUSED
    assert a.runs
    service.push(a.id)
    assert a.ended() == UNUSED


def test_status_names_checkpoints_with_their_levels(nodes: Nodes, service: FakeService):
    a = nodes.add("a", "--quota=12345678", ranks=[0], world_size=1)
    made = made_checkpoint(world_size=1, step=500)
    made.write(a.folder, [0], head=True)
    service.push(a.id, order(made, [0]))
    service.holds(a.id, made, [0])
    status = a.get("/status").said
    assert status["checkpoints"] == [{"attempt": "1-0", "step": 500, "level": "local", "ranks": [0]}]
    assert (status["id"], status["quota"]) == (a.id, 12_345_678)
    assert status["used"] > 200_000
    assert status["free"] > 0


@pytest.fixture
def followed() -> Iterator["subprocess.Popen[bytes]"]:
    """A process for a keeper to follow."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as sleeper:
        yield sleeper
        sleeper.kill()


def test_keeper_ends_with_the_process_that_it_follows(nodes: Nodes, followed: "subprocess.Popen[bytes]"):
    a = nodes.add("a", f"--follow={followed.pid}")
    followed.kill()
    assert a.ended() == 0
    assert not (a.folder / "keeper.json").exists()


def test_keeper_commits_in_shared_storage_before_it_ends(
    nodes: Nodes, service: FakeService, followed: "subprocess.Popen[bytes]", tmp_path: Path
):
    a = nodes.add("a", f"--follow={followed.pid}", ranks=[0], world_size=1)
    made = made_checkpoint(world_size=1)
    made.write(a.folder, [0], head=True)
    shared = str(tmp_path / "shared")
    service.push(a.id, order(made, [0], persist_to=shared))
    service.holds(a.id, made, [0])
    followed.kill()
    a.logged("has ended")
    service.push(a.id, order(made, [0], persist=[0], persist_to=shared))
    until(lambda: list(getattr(service.holding(a.id, made), "persisted_ranks", [])) == [0])
    service.push(a.id, order(made, [0], commit=True, persist_to=shared))
    until(lambda: getattr(service.holding(a.id, made), "persisted_as", ""))
    persisted = order(made, [0], persist_to=shared)
    persisted.level = pb.DURABILITY_LEVEL_PERSISTED
    service.push(a.id, persisted)
    assert a.ended() == 0
    assert (tmp_path / "shared" / "step-0000000010").exists()


def test_keeper_ends_when_a_rank_attaches_after_its_agent_has_ended(
    nodes: Nodes, service: FakeService, followed: "subprocess.Popen[bytes]", tmp_path: Path
):
    a = nodes.add("a", f"--follow={followed.pid}", ranks=[0], world_size=1)
    made = made_checkpoint(world_size=1)
    made.write(a.folder, [0], head=True)
    service.push(a.id, order(made, [0], persist_to=str(tmp_path / "shared")))
    service.holds(a.id, made, [0])
    followed.kill()
    a.logged("has ended")
    answer = a.post("/attach", generation=2, world_size=1, rank=0, replicas=1)
    assert (answer.status, "has ended" in answer.said["error"]) == (503, True)
    assert a.ended() == 0
