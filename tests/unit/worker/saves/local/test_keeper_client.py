"""What a rank asks its keeper, and what it does when the keeper fails."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.patience import PATIENCE
from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.local_folder import NOTES
from muster.v1 import local_pb2 as pb
from muster.worker.saves.local import keeper_client
from muster.worker.saves.local.folder import RunningKeeper
from muster.worker.saves.local.keeper_client import KeeperClient
from muster.worker.saves.local.keeper_process import KeeperError
from muster.worker.saves.local.level import Level
from tests.support.saves.fake_keepers import Cluster, FakeKeeper

ATTEMPT = SaveAttempt(2, 3)


class Finder:
    """Finds the test's keeper, and starts it if it has ended."""

    def __init__(self, keeper: FakeKeeper) -> None:
        self.keeper = keeper
        self.started = 0

    def find(self, timeout: float) -> RunningKeeper:
        if not self.keeper.alive:
            self.started += 1
            self.keeper.start()
        running = self.keeper.folder.keeper()
        assert running is not None
        return running


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[FakeKeeper]:
    made = FakeKeeper(Cluster(), tmp_path)
    yield made
    made.stop()


@pytest.fixture
def finder(keeper: FakeKeeper) -> Finder:
    return Finder(keeper)


@pytest.fixture
def client(finder: Finder) -> Iterator[KeeperClient]:
    made = KeeperClient(finder)
    yield made
    made.close()


def test_rank_is_attached(client: KeeperClient, keeper: FakeKeeper):
    assert client.attach(2, 4, 1, 1, PATIENCE) == "keeper-0"
    assert keeper.attached == [{"generation": 2, "world_size": 4, "rank": 1, "replicas": 1}]


def test_attachment_waits_for_the_coordinator(
    client: KeeperClient,
    keeper: FakeKeeper,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr(keeper_client, "WARN_AFTER", 0.0)
    keeper.answers = [(503, {"error": "the coordinator is away"})] * 3
    with caplog.at_level(logging.WARNING):
        assert client.attach(2, 4, 1, 1, PATIENCE) == "keeper-0"
    assert caplog.text.count("the coordinator is away") == 1


def test_attachment_that_takes_too_long_is_an_error(client: KeeperClient, keeper: FakeKeeper):
    keeper.answers = [(503, {"error": "the coordinator is away"})] * 99
    with pytest.raises(KeeperError, match=r"did not carry out /attach.*the coordinator is away"):
        client.attach(2, 4, 1, 1, 0.2)


def test_refusal_is_an_error_at_once(client: KeeperClient, keeper: FakeKeeper):
    keeper.answers = [(400, {"error": "generation is missing"})]
    with pytest.raises(KeeperError, match="refused /attach: generation is missing"):
        client.attach(2, 4, 1, 1, PATIENCE)


def test_keeper_that_ended_is_started_by_the_next_request(
    client: KeeperClient, keeper: FakeKeeper, finder: Finder
):
    client.attach(2, 4, 1, 1, PATIENCE)
    keeper.stop()
    assert client.attach(2, 4, 1, 1, PATIENCE) == "keeper-0"
    assert finder.started == 1


def test_next_life_of_a_keeper_on_the_same_port_is_found(client: KeeperClient, keeper: FakeKeeper):
    """It has another token."""
    client.attach(2, 4, 1, 1, PATIENCE)
    keeper.token = "another"
    path = keeper.folder.path / "keeper.json"
    running = keeper.folder.keeper()
    assert running is not None
    path.write_text(path.read_text().replace(running.token, "another"))
    assert client.attach(2, 4, 1, 1, PATIENCE) == "keeper-0"


def test_connection_is_used_again(client: KeeperClient, keeper: FakeKeeper):
    client.attach(2, 4, 1, 1, PATIENCE)
    (first,) = client._idle
    client.attach(2, 4, 1, 1, PATIENCE)
    assert client._idle == [first]


def test_notes_are_taken_in_order(client: KeeperClient, keeper: FakeKeeper):
    keeper.ranks = {0, 1}
    notes = keeper.folder.attempt(ATTEMPT) / NOTES
    notes.mkdir(parents=True)
    (notes / "written-0").write_bytes(b"\x00")
    (notes / "written-1").write_bytes(b"\xff")
    assert client.take(ATTEMPT, [(1, "written-1"), (0, "written-0")], PATIENCE) == [b"\xff", b"\x00"]
    with pytest.raises(FileNotFoundError, match="share-1 is not there"):
        client.take(ATTEMPT, [(0, "share-1")], PATIENCE)


@pytest.mark.parametrize("status", [404, 410])
def test_file_that_no_keeper_has_whole_is_absent(client: KeeperClient, keeper: FakeKeeper, status: int):
    keeper.answers = [(status, {"error": "all copies are damaged"})]
    with pytest.raises(FileNotFoundError, match="all copies are damaged"):
        client.find(ATTEMPT, "a.distcp", PATIENCE)


def test_damage_is_reported_to_the_keeper(client: KeeperClient, keeper: FakeKeeper):
    with pytest.raises(FileNotFoundError):
        client.find(ATTEMPT, "a.distcp", PATIENCE, damaged=True)
    assert keeper.asked == [
        ("/fetch", {"attempt": "2-3", "name": "a.distcp", "pieces": True, "verify": True})
    ]


def test_fetch_gives_up_on_silent_sources_before_its_timeout(
    client: KeeperClient, keeper: FakeKeeper, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(keeper_client, "FETCH_PATIENCE", 0.2)
    keeper.answers = [(503, {"error": "no source answers"})] * 99
    with pytest.raises(KeeperError, match="no source answers"):
        client.find(ATTEMPT, "a.distcp", 1e6)


def test_checkpoints_have_their_levels(client: KeeperClient, keeper: FakeKeeper):
    keeper.cluster.commits = {ATTEMPT: pb.LocalCheckpoint(step=9)}
    keeper.folder.attempt(ATTEMPT).mkdir()
    (one,) = client.checkpoints(PATIENCE)
    assert (one.attempt, one.step, one.level) == (ATTEMPT, 9, Level.LOCAL)
