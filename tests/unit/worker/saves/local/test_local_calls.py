"""Calls about local checkpoints: sent again until they are answered."""

from collections.abc import Iterator

import grpc
import pytest

from lab.patience import PATIENCE
from muster.v1 import local_pb2 as pb
from muster.worker.errors import ConnectError, RefusedError
from muster.worker.saves.local import local_calls
from muster.worker.saves.local.level import Level
from muster.worker.saves.local.local_calls import LocalCheckpointCalls
from tests.support.grpc_server import serving
from tests.support.saves.fake_keepers import Cluster, FakeLocalCheckpoints, served


@pytest.fixture
def service() -> FakeLocalCheckpoints:
    return FakeLocalCheckpoints(Cluster())


@pytest.fixture
def calls(service: FakeLocalCheckpoints, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCheckpointCalls]:
    monkeypatch.setattr(local_calls, "PAUSE", 0.01)
    with served(service) as endpoint:
        yield LocalCheckpointCalls(endpoint, "job")


def test_commit_answers_the_level(calls: LocalCheckpointCalls, service: FakeLocalCheckpoints):
    assert (
        calls.commit(pb.LocalCheckpoint(step=3), "keeper-0", Level.REPLICATED, PATIENCE) is Level.REPLICATED
    )
    (request,) = service.requests
    assert (request.run_id, request.checkpoint.step, request.keeper_id) == ("job", 3, "keeper-0")
    assert request.wait_for == pb.DURABILITY_LEVEL_REPLICATED


def test_keeper_is_looked_after_before_each_call(calls: LocalCheckpointCalls, service: FakeLocalCheckpoints):
    service.fails = [grpc.StatusCode.UNAVAILABLE] * 2
    looked: list[int] = []
    assert not calls.recover(0, 0, 1, PATIENCE, lambda: looked.append(1)).HasField("checkpoint")
    assert len(looked) == 3


def test_coordinator_that_stays_away_is_an_error(calls: LocalCheckpointCalls, service: FakeLocalCheckpoints):
    service.fails = [grpc.StatusCode.UNAVAILABLE] * 1000
    with pytest.raises(
        ConnectError, match=r"did not decide what to resume from within 0\.2 s; last error: UNAVA"
    ):
        calls.recover(0, 0, 1, 0.2)
    with pytest.raises(
        ConnectError, match="did not make step 3 a local checkpoint that is replicated within"
    ):
        calls.commit(pb.LocalCheckpoint(step=3), "keeper-0", Level.REPLICATED, 0.2)


def test_older_coordinator_is_named():
    with serving() as endpoint:
        with pytest.raises(RefusedError, match="the coordinator is of an older version") as raised:
            LocalCheckpointCalls(endpoint, "job").recover(0, 0, 1, PATIENCE)
        assert raised.value.reason == "UNIMPLEMENTED"


def test_unknown_level_is_named():
    assert Level.of("persisted") is Level.PERSISTED
    with pytest.raises(ValueError, match='wait_for = \'all\': it must be one of "local", "replicated"'):
        Level.of("all")
