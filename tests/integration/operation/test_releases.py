"""What docs/compatibility.md promises: the last release's SDK, coordinator, state and backup with today's."""

import ast
import itertools
import json
import sqlite3
import subprocess
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import grpc
import pytest

import muster.worker
from lab.patience import PATIENCE
from lab.processes.coordinator import Coordinator, free_port
from lab.processes.etcd import cluster
from lab.processes.proxy import Proxy
from lab.processes.relay import Relay
from lab.processes.replicas import replicas
from muster.service.core.vocabulary.refusal import Reason
from muster.service.storage.sqlite import SCHEMA_VERSION
from muster.v1 import (
    barrier_pb2,
    barrier_pb2_grpc,
    common_pb2,
    coordinator_pb2,
    coordinator_pb2_grpc,
    store_pb2,
    store_pb2_grpc,
)
from muster.worker import GrpcBarrier, WriteReport
from tests.support.ranks import everyone, ranks
from tests.support.releases import LAST, TIMEOUT, WHEEL, Installed, unpack

ROOT = Path(__file__).resolve().parents[3]
HEAD = Installed()
DECIDED = [
    ("checkpoint", 0, common_pb2.OUTCOME_RELEASED),
    ("checkpoint", 2, common_pb2.OUTCOME_ABORTED),
    ("checkpoint", 3, common_pb2.OUTCOME_RELEASED),
    ("late", 0, common_pb2.OUTCOME_TIMED_OUT),
]
"""What the two users of release_user.py leave; #1 had payloads, and was forgotten at the next release."""


@dataclass(frozen=True, slots=True)
class Left:
    """What a coordinator of the last release has left."""

    seen: list[dict[str, Any]]
    """By its users."""
    version: str
    """As it said."""
    state: Path
    backup: Path


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return unpack(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="module")
def left(last: Installed, tmp_path_factory: pytest.TempPathFactory) -> Left:
    """A coordinator of the last release with a run of one node of each version; a backup; its end."""
    folder = tmp_path_factory.mktemp("left")
    state, backup = folder / "muster.db", folder / "backup.db"
    with last.coordinator(folder) as coordinator:
        seen = meet(coordinator.endpoint, HEAD, last)
        version = told_version(coordinator)
        last.muster("backup", str(backup), "--state", f"sqlite:///{state}")
        assert coordinator.stop() == 0
    return Left(seen, version, state, backup)


def meet(endpoint: str, *versions: Installed) -> list[dict[str, Any]]:
    """What a run's users saw, one of each of these versions, in this order."""
    users = [version.user(endpoint) for version in versions]
    try:
        return [result(user) for user in users]
    finally:
        for user in users:
            user.kill()
            user.communicate()


def result(user: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = user.communicate(timeout=TIMEOUT)
    assert user.returncode == 0, err
    seen: dict[str, Any] = json.loads(out)
    return seen


def told_version(coordinator: Coordinator) -> str:
    with grpc.insecure_channel(coordinator.endpoint) as channel:
        status = coordinator_pb2_grpc.CoordinatorServiceStub(channel).Status(
            coordinator_pb2.StatusRequest(), timeout=TIMEOUT
        )
    version: str = status.version
    return version


def decided(channel: grpc.Channel) -> list[tuple[str, int, int]]:
    barriers = barrier_pb2_grpc.BarrierServiceStub(channel).List(
        barrier_pb2.BarrierServiceListRequest(run_id="job1", history=1000), timeout=TIMEOUT
    )
    return sorted((one.prefix, one.sequence, one.decision.outcome) for one in barriers.barriers)


def assert_all_went_well(seen: list[dict[str, Any]]) -> None:
    assert sorted(one["rank"] for one in seen) == [0, 1]
    for one in seen:
        assert one["world_size"] == 2
        assert one["gathered"] == ["from 0", "from 1"]
        assert 'barrier "checkpoint" #2' in one["aborted"]
        assert "disk full" in one["aborted"]
        assert "timed out" in one["timed_out"]
        assert "rank 1" in one["timed_out"]
        assert one["total"] == 2
        assert one["names"] == ["node-0", "node-1"]
        assert one["sequence"] == 4
    assert sorted(one["counted"] for one in seen) == [1, 2]


def assert_two_versions(seen: list[dict[str, Any]], last: Installed) -> None:
    head, release = seen
    assert (head["version"], release["version"]) == (told_here(), LAST)
    assert Path(release["file"]).is_relative_to(last.site or "")
    assert Path(head["file"]).is_relative_to(ROOT / "worker_sdk")


def told_here() -> str:
    return HEAD.muster("--version").split()[1]


def assert_goes_on(endpoint: str) -> None:
    """All that the users left is there, and the group goes on with the next barrier."""
    with grpc.insecure_channel(endpoint) as channel:
        assert decided(channel) == DECIDED
        keys = store_pb2.StoreServiceGetRequest(run_id="job1", keys=["name-1", "count"])
        values = store_pb2_grpc.StoreServiceStub(channel).Get(keys, timeout=TIMEOUT).values
        assert list(values) == [b"node-1", b"2"]
        arrival = barrier_pb2.ArriveRequest(
            run_id="job1", generation=9, prefix="checkpoint", world_size=1, timeout_ms=60_000, incarnation="x"
        )
        answer = barrier_pb2_grpc.BarrierServiceStub(channel).Arrive(arrival, timeout=TIMEOUT)
        assert (answer.decision.sequence, answer.decision.outcome) == (4, common_pb2.OUTCOME_RELEASED)


# A process that imports torch takes long where others run.
pytestmark = pytest.mark.timeout(600)

# ---------------------------------------------------------------------- SDK and coordinator


def test_both_sdks_on_the_coordinator_of_today(last: Installed, tmp_path: Path):
    with HEAD.coordinator(tmp_path) as coordinator:
        seen = meet(coordinator.endpoint, HEAD, last)
        assert told_version(coordinator) == told_here()
        assert "job1" in last.muster("get", "runs", "--endpoint", coordinator.endpoint)
    assert_two_versions(seen, last)
    assert_all_went_well(seen)


def test_both_sdks_on_the_last_releases_coordinator(left: Left, last: Installed):
    assert left.version == LAST
    assert_two_versions(left.seen, last)
    assert_all_went_well(left.seen)


def test_report_of_a_save_is_nothing_to_the_last_releases_coordinator(last: Installed, tmp_path: Path):
    with last.coordinator(tmp_path) as coordinator:
        try:
            barrier = GrpcBarrier(0, 1, "save", coordinator.endpoint, TIMEOUT, TIMEOUT, run_id="job1")
            assert barrier.vote(report=WriteReport(step=1, bytes=1, seconds=1.0, commits=True)).released
        finally:
            muster.worker.close()


def test_both_sdks_on_replicas_behind_one_address(last: Installed, tmp_path: Path):
    """Give each connection to the next replica, as a Service of Kubernetes does."""
    with cluster() as etcd, replicas(tmp_path, etcd, extra=(f"--session-ttl={PATIENCE}",)) as three:
        turns = itertools.cycle(one.coordinator.port for one in [*three.standbys(), three.leader()])
        with Proxy(lambda: next(turns)) as service:
            seen = meet(service.endpoint, HEAD, last)
    assert_two_versions(seen, last)
    assert_all_went_well(seen)


def test_both_sdks_through_a_relay_of_today(last: Installed, tmp_path: Path):
    with (
        HEAD.coordinator(tmp_path) as coordinator,
        Relay(tmp_path, coordinator.endpoint, listen=f"127.0.0.1:{free_port()}") as relay,
    ):
        seen = meet(relay.listen, HEAD, last)
        assert relay.metric("muster_relay_arrivals_total") >= 2 * len(DECIDED)
    assert_two_versions(seen, last)
    assert_all_went_well(seen)


def test_a_relay_before_the_last_releases_coordinator_is_done_without(last: Installed, tmp_path: Path):
    with (
        last.coordinator(tmp_path) as coordinator,
        Relay(tmp_path, coordinator.endpoint) as relay,
        ranks(relay.endpoint, 2) as job,
    ):
        assert [heard.outcome for heard in everyone(job)] == ["RELEASED"] * 2
        assert relay.metric("muster_relay_arrivals_total") == 0
        said = relay.log_path.read_text()
    assert "does not reach the coordinator (its version does not support relays" in said
    # Once, however often it is asked.
    assert said.count("does not support relays") == 1


# ---------------------------------------------------------------------- state and backup


def test_the_state_of_the_last_release_is_opened(left: Left, tmp_path: Path):
    (tmp_path / "muster.db").write_bytes(left.state.read_bytes())
    with HEAD.coordinator(tmp_path) as coordinator:
        assert_goes_on(coordinator.endpoint)
        assert coordinator.stop() == 0
    with closing(sqlite3.connect(tmp_path / "muster.db")) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)


def test_the_backup_of_the_last_release_is_restored(left: Left, tmp_path: Path):
    HEAD.muster("restore", str(left.backup), "--state", f"sqlite:///{tmp_path / 'muster.db'}")
    with HEAD.coordinator(tmp_path) as coordinator:
        assert_goes_on(coordinator.endpoint)


def test_subset_group_of_the_last_release_goes_on(last: Installed, tmp_path: Path):
    """Its owners' records have the participants; those of today name a record of the group."""
    with last.coordinator(tmp_path) as coordinator:
        assert subset_meets(coordinator.endpoint) == (0, common_pb2.OUTCOME_RELEASED)
        assert coordinator.stop() == 0
    for sequence in (1, 2):
        with HEAD.coordinator(tmp_path) as coordinator:
            assert subset_meets(coordinator.endpoint) == (sequence, common_pb2.OUTCOME_RELEASED)
            assert coordinator.stop() == 0


def subset_meets(endpoint: str) -> tuple[int, int]:
    """Ranks 0 and 2 of 3 arrive in a group of their own. Returns the sequence and the outcome."""
    with grpc.insecure_channel(endpoint) as channel:
        stub = barrier_pb2_grpc.BarrierServiceStub(channel)
        calls = [
            stub.Arrive.future(
                barrier_pb2.ArriveRequest(
                    run_id="job1",
                    prefix="subset",
                    rank=rank,
                    world_size=3,
                    participants=(0, 2),
                    timeout_ms=60_000,
                    incarnation=f"p{rank}",
                    host="node-0",
                ),
                timeout=TIMEOUT,
            )
            for rank in (0, 2)
        ]
        (decision,) = {(call.result().decision.sequence, call.result().decision.outcome) for call in calls}
    return decision


def test_a_state_of_a_layout_to_come_is_refused_by_the_last_release_and_left_alone(
    left: Left, last: Installed, tmp_path: Path
):
    state = tmp_path / "muster.db"
    state.write_bytes(left.state.read_bytes())
    with closing(sqlite3.connect(state)) as db:
        db.execute("PRAGMA user_version = 1000")
    before = state.read_bytes()
    done = subprocess.run(
        [*last.program, "serve", "--state", f"sqlite:///{state}"],
        env=last.environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode != 0
    assert "written by a newer Muster (schema 1000" in done.stderr
    assert state.read_bytes() == before


# ---------------------------------------------------------------------- names


def released(module: str) -> ast.Module:
    with ZipFile(WHEEL) as wheel:
        return ast.parse(wheel.read(module))


@pytest.mark.parametrize("module", ["__init__", "barriers", "saves/__init__"])
def test_the_sdk_offers_what_the_last_release_offers(module: str):
    assert set(listed(released(f"muster/worker/{module}.py"))) <= set(
        listed(ast.parse((ROOT / f"worker_sdk/muster/worker/{module}.py").read_text()))
    )


def listed(module: ast.Module) -> list[str]:
    """Its ``__all__``."""
    (names,) = (
        one.value
        for one in module.body
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "__all__"
    )
    found: list[str] = ast.literal_eval(names)
    return found


def test_the_reasons_of_refusals_stay():
    (reasons,) = (
        one
        for one in released("muster/service/core/refusal.py").body
        if isinstance(one, ast.ClassDef) and one.name == "Reason"
    )
    names = [ast.unparse(one.targets[0]) for one in reasons.body if isinstance(one, ast.Assign)]
    assert "PROTOCOL_VERSION" in names
    assert set(names) <= set(Reason.__members__)
