"""Peers that want to do harm: floods, crowds of connections, and calls that never end."""

import json
import resource
import ssl
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from lab.authority import Authority
from lab.patience import PATIENCE, until
from lab.processes.command import job
from lab.processes.coordinator import Coordinator
from lab.processes.proxy import Proxy
from muster.service.web.connections import MAX_CONNECTIONS
from muster.v1 import (
    run_pb2,
    run_pb2_grpc,
)
from tests.support.expect import some
from tests.support.rich_status import reason_of
from tests.support.tokens import arrive_alone, tokens


def support(module: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.support.hostile.{module}", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )


def rest_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for a process after a read of its first line: ``communicate`` would lose what is buffered."""
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = process.stdout.read(), process.stderr.read()
    return process.wait(PATIENCE), out, err


def test_a_peer_has_so_many_sessions_and_another_peer_its_own(tmp_path: Path):
    extra = ("--max-sessions-per-peer=2",)
    with (
        Coordinator(tmp_path, state="memory:", extra=extra) as coordinator,
        Proxy(coordinator.port, "127.0.0.2") as other,
        grpc.insecure_channel(coordinator.endpoint) as near,
        grpc.insecure_channel(other.endpoint) as far,
    ):
        watches = []

        def watch(connection: grpc.Channel):
            stream = run_pb2_grpc.RunServiceStub(connection).Watch(run_pb2.WatchRequest())
            watches.append(stream)
            return stream

        arrive_alone(near, "r")
        next(watch(near))
        next(watch(near))
        with pytest.raises(grpc.RpcError) as caught:
            next(watch(near))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "max_sessions_per_peer is 2" in some(caught.value.details())
        next(watch(far))
        watches[0].cancel()

        def room() -> bool:
            try:
                next(watch(near))
            except grpc.RpcError:
                return False
            return True

        until(room)
        for stream in watches:
            stream.cancel()


def test_flood_of_one_peer_is_slowed_and_other_barriers_continue(tmp_path: Path):
    rate = 100
    with Coordinator(
        tmp_path, state="memory:", extra=(f"--max-messages-per-second-per-peer={rate}",)
    ) as coordinator:
        flood = support("flood", coordinator.port, "127.0.0.2", rate)
        assert flood.stdout is not None
        assert flood.stdout.readline() == "flooding\n", flood.communicate()
        with job(coordinator) as running:
            running.arrive(1, [3])
            for sequence in range(2, 22):
                running.arrive(sequence, range(4))
                running.decision()
        out, err = flood.communicate("enough\n", timeout=PATIENCE)
        assert flood.returncode == 0, err
        counts = json.loads(out)
        # What one burst and the rate allow; its streams had far more to say.
        assert 0 < counts["heard"] <= rate * (1 + counts["seconds"]) + counts["streams"]
        assert counts["said"] > counts["heard"]


def test_idle_connections_are_closed_and_disturb_no_job(tmp_path: Path):
    """Ten thousand, or as many as this machine lets a process open."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    count = min(10_000, (most - 2_000) * 2 // 3)
    print(f"{count:,} connections are opened; a process may have {most:,} open files")
    with Coordinator(tmp_path, state="memory:") as coordinator:
        crowds = [
            support("half_open", coordinator.port, count // 2, "silent"),
            support("half_open", coordinator.port, count // 2 - 500, "preface"),
            support("half_open", coordinator.http_port, MAX_CONNECTIONS + 500, "headers"),
        ]
        try:
            for crowd in crowds:
                assert crowd.stdout is not None
                assert crowd.stdout.readline() == "open\n", crowd.communicate()
            with job(coordinator) as running:
                running.arrive(1, [3])
                assert "RELEASED" in str(running.decision())
            assert coordinator.get("/readyz")[0] == 200
            # They are let go by the coordinator; until then they only wait.
            for crowd in crowds:
                assert rest_of(crowd) == (0, "all were closed\n", "")
        finally:
            for crowd in crowds:
                crowd.kill()
                crowd.communicate()
        assert "Traceback" not in coordinator.log_path.read_text()


def test_connections_that_begin_no_tls_are_bounded_on_the_http_port(
    tmp_path: Path,
):
    """Each holds an open file of the coordinator, and gRPC needs those."""
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    with Coordinator(
        tmp_path,
        state="memory:",
        extra=(f"--tls-cert={pair.cert}", f"--tls-key={pair.key}", "--http-tls"),
        https=ssl.create_default_context(cafile=authority.ca),
    ) as coordinator:
        files = Path(f"/proc/{coordinator.pid}/fd")
        before = len(list(files.iterdir()))
        crowd = support("half_open", coordinator.http_port, 3_000, "silent")
        try:
            assert crowd.stdout is not None
            assert crowd.stdout.readline() == "open\n", crowd.communicate()
            held = len(list(files.iterdir())) - before
            assert 0 < held <= MAX_CONNECTIONS + 1
            # A probe is answered all the same.
            assert coordinator.get("/readyz")[0] == 200
            assert rest_of(crowd) == (0, "all were closed\n", "")
        finally:
            crowd.kill()
            crowd.communicate()
        assert "Traceback" not in coordinator.log_path.read_text()


def test_health_checks_are_bounded_without_a_token_and_hold_no_drain_up(tmp_path: Path):
    (tmp_path / "tokens.toml").write_text(tokens())
    with (
        Coordinator(
            tmp_path,
            state="memory:",
            extra=(
                f"--tokens-file={tmp_path / 'tokens.toml'}",
                "--max-sessions-per-peer=2",
                "--drain-grace=600",
            ),
        ) as coordinator,
        grpc.insecure_channel(coordinator.endpoint) as connection,
    ):
        health = health_pb2_grpc.HealthStub(connection)
        watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for watch in watches:
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            next(health.Watch(health_pb2.HealthCheckRequest()))
        assert "max_sessions_per_peer is 2" in some(caught.value.details())
        # It would wait for 600 s, were one of them left; the test waits for less.
        assert coordinator.stop() == 0
        for watch in watches:
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.RpcError) as caught:
                next(watch)
            assert reason_of(caught.value) == "COORDINATOR_DRAINING"
