"""The audit log of a real coordinator."""

import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest

import muster.worker
from lab.authority import Authority
from lab.patience import until
from lab.processes.coordinator import Coordinator, free_port
from lab.processes.relay import Relay
from muster.v1 import run_pb2, run_pb2_grpc
from muster.worker import CoordinatorStore, GrpcBarrier, MusterError

WORKER, OPERATOR = "worker-of-team-a-0123456789", "operator-of-all-0123456789"
WATCHER = "watcher-of-node-1-0123456789"
TOKENS = f"""
[[token]]
name = "team-a"
role = "worker"
runs = ["team-a.*"]
token = "{WORKER}"

[[token]]
name = "node-1"
role = "watcher"
nodes = ["node-1"]
token = "{WATCHER}"

[[token]]
name = "ann"
role = "operator"
token = "{OPERATOR}"
"""


def test_audit_log_of_a_relay_names_the_callers_that_the_coordinator_does_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "tokens.toml").write_text(TOKENS)
    path = tmp_path / "relay.jsonl"
    extra = (f"--tokens-file={tmp_path / 'tokens.toml'}", f"--audit-log={path}")
    monkeypatch.setenv("MUSTER_TOKEN", WORKER)
    with (
        Coordinator(tmp_path, state="memory:") as coordinator,
        Relay(tmp_path, coordinator.endpoint, listen=f"127.0.0.1:{free_port()}", extra=extra) as relay,
    ):
        GrpcBarrier(0, 1, endpoint=relay.endpoint, run_id="team-a.1", generation=0).execute_barrier()
        CoordinatorStore(relay.endpoint, "team-a.1").set("key", "a secret")
        with pytest.raises(MusterError, match="team-b"):
            CoordinatorStore(relay.endpoint, "team-b.1").set("key", "a secret")
        with pytest.raises(MusterError, match="team-b"):
            GrpcBarrier(0, 1, endpoint=relay.endpoint, run_id="team-b.1", generation=0).execute_barrier()
        muster.worker.close()
        until(lambda: path.read_text().count("Connect") >= 3)
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [one["result"] for one in entries].count("RUN_NOT_ALLOWED") == 2, "a store's call and a session"
    assert {(one["who"], one["call"].rpartition("/")[2], one["run"], one["result"]) for one in entries} == {
        ("team-a", "Connect", "team-a.1", "OPEN"),
        ("team-a", "Connect", "team-a.1", "OK"),
        ("team-a", "Connect", "", "RUN_NOT_ALLOWED"),
        ("team-a", "Operate", "team-a.1", "FORWARDED"),
        ("team-a", "Operate", "team-b.1", "RUN_NOT_ALLOWED"),
    }
    assert "a secret" not in path.read_text()


def test_audit_log_of_a_relay_names_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    authority, path = Authority(tmp_path, "authority"), tmp_path / "relay.jsonl"
    served, client = authority.issue("localhost", "localhost"), authority.issue("a-rank")
    extra = (
        *(f"--tls-cert={served.cert}", f"--tls-key={served.key}", f"--tls-client-ca={authority.ca}"),
        f"--audit-log={path}",
    )
    port, environment = free_port(), {**os.environ}
    with (
        Coordinator(tmp_path, state="memory:") as coordinator,
        Relay(
            *(tmp_path, coordinator.endpoint),
            listen=f"localhost:{port}",
            extra=extra,
            environment=environment,
        ),
    ):
        monkeypatch.setenv("MUSTER_TLS_CA", str(authority.ca))
        monkeypatch.setenv("MUSTER_TLS_CERT", str(client.cert))
        monkeypatch.setenv("MUSTER_TLS_KEY", str(client.key))
        GrpcBarrier(0, 1, endpoint=f"localhost:{port}", run_id="job", generation=0).execute_barrier()
        CoordinatorStore(f"localhost:{port}", "job").set("key", "value")
        muster.worker.close()
        until(lambda: '"result": "OK"' in path.read_text())
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert {(one["call"].rpartition("/")[2], one["certificate"]) for one in entries} == {
        ("Connect", "a-rank"),
        ("Operate", "a-rank"),
    }


def test_audit_log_has_each_change_and_each_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "tokens.toml").write_text(TOKENS)
    path = tmp_path / "audit.jsonl"
    extra = (f"--tokens-file={tmp_path / 'tokens.toml'}", "--http-tokens", f"--audit-log={path}")
    monkeypatch.setenv("MUSTER_TOKEN", WORKER)

    def entries(**fields: object) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in path.read_text().splitlines()]
        return [entry for entry in found if fields.items() <= entry.items()]

    def evict(token: str) -> None:
        with grpc.insecure_channel(coordinator.endpoint) as channel:
            run_pb2_grpc.RunServiceStub(channel).Evict(
                run_pb2.EvictRequest(run_id="team-a.1", rank=0, reason="bad disk"),
                metadata=(("authorization", f"Bearer {token}"),),
            )

    with Coordinator(tmp_path, state="memory:", extra=extra) as coordinator:
        barrier = GrpcBarrier(0, 1, endpoint=coordinator.endpoint, run_id="team-a.1", generation=0)
        barrier.execute_barrier()
        CoordinatorStore(coordinator.endpoint, "team-a.1").set("key", "a secret")
        for token in (WORKER, "unknown-token-0123456789"):
            with pytest.raises(grpc.RpcError):
                evict(token)
        evict(OPERATOR)
        with (
            grpc.insecure_channel(coordinator.endpoint) as channel,
            pytest.raises(grpc.RpcError),
        ):
            run_pb2_grpc.RunServiceStub(channel).DrainNode(
                run_pb2.DrainNodeRequest(node_name="node-10", stop=True, reason="spot", notice_id="i-7"),
                metadata=(("authorization", f"Bearer {WATCHER}"),),
            )
        muster.worker.close()
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://127.0.0.1:{coordinator.http_port}/status.json")
        session = "/muster.v1.SessionService/Connect"
        until(lambda: len(entries(call=session)) >= 2)
        until(lambda: entries(call="GET /status.json"))
    opened = entries(call=session)[0]
    assert {**opened, "time": "", "from": ""} == {
        "time": "",
        "who": "team-a",
        "role": "worker",
        "from": "",
        "call": session,
        "run": "team-a.1",
        "result": "OPEN",
    }
    assert opened["from"].startswith("ipv4:127.0.0.1:")
    evictions = entries(call="/muster.v1.RunService/Evict")
    assert [(one["who"], one["run"], one["result"]) for one in evictions] == [
        ("team-a", "", "ROLE_TOO_LOW"),
        ("", "", "TOKEN_UNKNOWN"),
        ("ann", "team-a.1", "OK"),
    ]
    assert (evictions[2]["rank"], evictions[2]["reason"]) == (0, "bad disk")
    (drain,) = entries(call="/muster.v1.RunService/DrainNode")
    assert (drain["who"], drain["role"], drain["result"]) == ("node-1", "watcher", "NODE_NOT_ALLOWED")
    assert (drain["node_name"], drain["notice_id"], drain["stop"]) == ("node-10", "i-7", True)
    (change,) = entries(call="/muster.v1.StoreService/Operate", operation="set")
    assert (change["who"], change["run"], change["keys"], change["result"]) == (
        "team-a",
        "team-a.1",
        ["key"],
        "OK",
    )
    (page,) = entries(call="GET /status.json")
    assert (page["result"], page["from"]) == ("TOKEN_MISSING", "127.0.0.1")
    written = path.read_text()
    assert not any(secret in written for secret in (WORKER, WATCHER, OPERATOR, "a secret"))
    assert not entries(call="/muster.v1.RunService/List")
