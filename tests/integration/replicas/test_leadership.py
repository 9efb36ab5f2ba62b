"""Several coordinators on a real etcd: one leads, the others say so, and a lost one costs seconds."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status

from lab.authority import Authority
from lab.otlp_receiver import attributes, receiver
from lab.patience import PATIENCE, until
from lab.processes.coordinator import MUSTER, Coordinator, free_port
from lab.processes.etcd import Cluster, cluster
from lab.processes.replicas import SAFE_LEASE_TTL, Replica, Replicas, replicas
from muster.client.tracing import ENDPOINT
from muster.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
    store_pb2,
    store_pb2_grpc,
)


@pytest.fixture(scope="module")
def etcd() -> Iterator[Cluster]:
    with cluster() as members:
        yield members


@pytest.fixture
def three(etcd: Cluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Replicas]:
    with replicas(tmp_path, etcd, prefix=request.node.name, lease_ttl=SAFE_LEASE_TTL) as found:
        yield found


def status(replica: Replica, metadata: tuple[tuple[str, str], ...] = ()) -> coordinator_pb2.StatusResponse:
    with grpc.insecure_channel(replica.endpoint) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        return stub.Status(coordinator_pb2.StatusRequest(), timeout=PATIENCE, metadata=metadata)


def refusal(call: Any) -> ErrorInfo:
    """The details of a call that was refused."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return info_of(caught.value)


def info_of(error: Any) -> ErrorInfo:
    assert error.code() is grpc.StatusCode.UNAVAILABLE, error
    details = rpc_status.from_call(error)
    assert details is not None
    info = ErrorInfo()
    assert details.details[0].Unpack(info)
    return info


def not_leader(replica: Replica, other_than: str | None = "") -> ErrorInfo:
    """What a replica that does not lead answers."""
    metadata = () if other_than is None else (("muster-not-leader", other_than),)
    with grpc.insecure_channel(replica.endpoint) as channel:
        stub = run_pb2_grpc.RunServiceStub(channel)
        return refusal(
            lambda: stub.List(run_pb2.RunServiceListRequest(), metadata=metadata, timeout=PATIENCE)
        )


def test_one_replica_leads_and_the_others_name_it(three: Replicas):
    leader = three.leader()
    assert status(leader).epoch == 1
    everyone = sorted(replica.endpoint for replica in three.members)
    for standby in three.standbys():
        info = not_leader(standby)
        assert info.reason == "NOT_LEADER"
        assert info.metadata["leader"] == leader.endpoint
        assert info.metadata["replicas"].split(",") == everyone
        assert standby.coordinator.get("/healthz") == (200, "ok\n")
        assert standby.coordinator.get("/readyz") == (200, "ok: standing by\n")
        assert standby.status()["leader"] == leader.endpoint
        page = standby.coordinator.get("/")[1]
        assert f"<code>{leader.endpoint}</code> leads" in page
        metrics = standby.coordinator.get("/metrics")[1]
        assert "muster_leader 0.0" in metrics
        assert "muster_replicas 3.0" in metrics
    metrics = leader.coordinator.get("/metrics")[1]
    assert "muster_leader 1.0" in metrics
    assert 'muster_etcd_call_seconds_count{code="OK",method="Txn"}' in metrics
    with grpc.insecure_channel(leader.endpoint) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        found = stub.Replicas(coordinator_pb2.ReplicasRequest(), timeout=PATIENCE).replicas
    assert [(one.address, one.leads) for one in found] == [(one, one == leader.endpoint) for one in everyone]


def test_when_the_leader_is_killed_another_one_leads(three: Replicas):
    first = three.leader()
    first.coordinator.kill()
    second = three.leader()
    assert status(second).epoch == 2
    first.coordinator.start()
    until(lambda: first.status()["leader"] == second.endpoint, "who comes back does not know who leads")
    standby = next(one for one in three.standbys() if one is not first)
    assert "muster_leader_changes_total 1.0" in standby.coordinator.get("/metrics")[1]


def test_each_change_of_the_leader_is_a_start_span_with_the_next_epoch(
    etcd: Cluster, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    with receiver() as received:
        monkeypatch.setenv(ENDPOINT, received.endpoint)
        with replicas(
            tmp_path, etcd, 2, prefix=request.node.name, lease_ttl=SAFE_LEASE_TTL, direct=True
        ) as two:
            received.await_spans(lambda found: len(found) == 1)
            two.leader().coordinator.kill()
            two.leader()
            spans = received.await_spans(lambda found: len(found) == 2)
    starts = [attributes(span)["muster.epoch"] for _, span in spans if span.name == "start"]
    assert starts == [1, 2]


def test_leader_hands_over_when_it_is_stopped(three: Replicas):
    first = three.leader()
    assert first.coordinator.stop() == 0
    second = three.leader()
    # At once, and not when its lease would have ended: it is gone from etcd.
    assert not_leader(three.standbys()[0]).metadata["replicas"].count(",") == 1
    assert status(second).epoch == 2


def test_a_leader_that_was_stopped_for_longer_than_its_lease_says_nothing_more(three: Replicas):
    first = three.leader()
    first.coordinator.signal(signal.SIGSTOP)
    second = three.leader()
    waiting = grpc.insecure_channel(first.endpoint)
    asked = coordinator_pb2_grpc.CoordinatorServiceStub(waiting).Status.future(
        coordinator_pb2.StatusRequest()
    )
    first.coordinator.signal(signal.SIGCONT)
    assert first.coordinator.ended() == 1
    with pytest.raises(grpc.RpcError):
        asked.result(timeout=PATIENCE)
    waiting.close()
    assert "is over, or may be" in first.coordinator.log_path.read_text()
    assert status(second).epoch == 2


def test_a_leader_that_is_cut_from_etcd_ends_before_another_one_leads(three: Replicas):
    first = three.leader()
    first.cut_from_etcd()
    assert first.coordinator.ended() == 1
    assert status(three.leader()).epoch == 2
    first.heal()
    first.coordinator.start()
    until(lambda: first.coordinator.get("/readyz")[0] == 200, "it does not stand by")


def test_client_that_cannot_reach_the_leader_learns_the_next_one(three: Replicas):
    first = three.leader()
    standby = three.standbys()[0]
    first.coordinator.signal(signal.SIGSTOP)
    named = first.endpoint
    while named in ("", first.endpoint):
        try:
            status(standby, (("muster-not-leader", first.endpoint),))
            named = standby.endpoint
        except grpc.RpcError as error:
            # Who is about to lead closes its port for a moment.
            named = info_of(error).metadata["leader"] if rpc_status.from_call(error) else ""
    assert named == three.leader().endpoint
    first.coordinator.signal(signal.SIGCONT)


def test_a_standby_that_cannot_follow_is_not_ready(three: Replicas):
    standby = three.standbys()[0]
    standby.cut_from_etcd()
    until(lambda: standby.coordinator.get("/readyz")[0] == 503, "it says that it is ready")
    until(
        lambda: "no member of etcd answered" in standby.coordinator.get("/readyz")[1], "it does not say why"
    )
    standby.heal()
    until(lambda: standby.coordinator.get("/readyz")[0] == 200, "it does not come back")


def test_all_are_killed_at_once_and_nothing_is_lost(three: Replicas):
    first = three.leader()
    with grpc.insecure_channel(first.endpoint) as channel:
        entry = store_pb2.KeyValue(key="k", value=b"v")
        store_pb2_grpc.StoreServiceStub(channel).Set(
            store_pb2.SetRequest(
                run_id="job1", entries=[entry], operation=store_pb2.OperationId(client="c", number=1)
            ),
            timeout=PATIENCE,
        )
    for replica in three.members:
        replica.coordinator.kill()
    three.start()
    leader = three.leader()
    with grpc.insecure_channel(leader.endpoint) as channel:
        got = store_pb2_grpc.StoreServiceStub(channel).Get(
            store_pb2.StoreServiceGetRequest(run_id="job1", keys=["k"], timeout_ms=1000), timeout=PATIENCE
        )
    assert list(got.values) == [b"v"]


# ---------------------------------------------------------------------- who may be told, and what


def test_standby_names_the_leader_only_to_callers_with_access(etcd: Cluster, tmp_path: Path):
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('[[token]]\nname = "w"\nrole = "worker"\ntoken = "let-me-in-please-1234"\n')
    tokens.chmod(0o600)
    with replicas(tmp_path, etcd, 2, prefix="tokens", extra=(f"--tokens-file={tokens}",)) as two:
        standby = two.standbys()[0]
        with grpc.insecure_channel(standby.endpoint) as channel:
            stub = run_pb2_grpc.RunServiceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.List(run_pb2.RunServiceListRequest(), timeout=PATIENCE)
            error: Any = caught.value
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            assert two.leader().endpoint not in str(error)
            let_in = (("authorization", "Bearer let-me-in-please-1234"), ("muster-not-leader", ""))
            info = refusal(
                lambda: stub.List(run_pb2.RunServiceListRequest(), metadata=let_in, timeout=PATIENCE)
            )
            assert info.metadata["leader"] == two.leader().endpoint


# ---------------------------------------------------------------------- bad input


def failed(*arguments: str) -> str:
    """What ``muster serve`` says that does not start."""
    port, http = free_port(), free_port()
    done = subprocess.run(
        [str(MUSTER), "serve", f"--listen=127.0.0.1:{port}", f"--http=127.0.0.1:{http}", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode in (1, 2), done.stderr
    return " ".join(done.stderr.replace("│", " ").split())


def test_a_prefix_of_another_program_is_refused(etcd: Cluster):
    with grpc.insecure_channel(etcd.endpoints[0]) as channel:
        call: Any = channel.unary_unary("/etcdserverpb.KV/Put")
        call(b"\n\x0f/theirs/setting\x12\x011", timeout=PATIENCE)
    said = failed(f"--state={etcd.state('theirs')}", "--lease-ttl=2")
    assert "holds keys that are not Muster's" in said
    assert "Give --state another prefix" in said


def test_two_replicas_with_one_address_are_told_apart(three: Replicas):
    leader = three.leader()
    said = failed(f"--state={leader.coordinator.state}", "--lease-ttl=2", f"--advertise={leader.endpoint}")
    assert f"another replica is reached at {leader.endpoint}" in said
    assert "--advertise HOST:PORT" in said


def test_an_address_that_nobody_can_reach_is_refused(etcd: Cluster):
    done = subprocess.run(
        [
            str(MUSTER),
            "serve",
            "--listen=0.0.0.0:0",
            "--insecure",
            "--http=127.0.0.1:0",
            f"--state={etcd.state('any')}",
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 1
    assert "Give --advertise HOST:PORT" in done.stderr


def test_an_etcd_that_speaks_no_tls_is_found_out(etcd: Cluster, tmp_path: Path):
    ca = Authority(tmp_path).ca
    said = failed(f"--state={etcd.state('tls')}", "--lease-ttl=2", f"--etcd-ca={ca}")
    assert "is closed in the TLS handshake" in said


def test_an_etcd_that_is_not_there_is_waited_for_and_said_so(tmp_path: Path):
    """An outage of etcd must not make replicas end: Kubernetes would wait ever longer to start them again."""
    coordinator = Coordinator(
        tmp_path, state=f"etcd://127.0.0.1:{free_port()}/muster", extra=("--lease-ttl=2",)
    )
    coordinator.begin()
    try:
        coordinator.logged("standing by")
        until(lambda: "no member of etcd answered" in coordinator.get("/readyz")[1], "it does not say why")
        assert coordinator.get("/readyz")[0] == 503
        assert coordinator.get("/healthz") == (200, "ok\n")
        assert coordinator.logged("etcd.unreachable")
    finally:
        coordinator.kill()
