"""Tokens, roles and runs against a real coordinator; and peers that want to do harm."""

import json
import os
import queue
import resource
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

import muster.worker
from lab.authority import Authority
from lab.patience import PATIENCE, until
from lab.processes.command import job
from lab.processes.coordinator import Coordinator
from lab.processes.proxy import Proxy
from muster.service.cli.failure import Exit
from muster.service.cli.main import app
from muster.service.rpc.server import METHODS, SERVICES
from muster.service.security.access import RULES
from muster.service.security.grants import Role
from muster.service.web.connections import MAX_CONNECTIONS
from muster.v1 import (
    barrier_pb2,
    barrier_pb2_grpc,
    coordinator_pb2,
    coordinator_pb2_grpc,
    rendezvous_pb2,
    rendezvous_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    store_pb2,
    store_pb2_grpc,
)
from muster.worker import CoordinatorStore, GrpcBarrier, RefusedError
from muster.worker.decision import Decision
from muster.worker.node.membership import NodeConfig, NodeMembership, Place
from muster.worker.transport import channel
from tests.integration.security.test_bad_input import reason_of
from tests.support.expect import some

SECRETS = {role: f"{role.name.lower()}-of-team-a-0123456789" for role in Role}
ANOTHER = "operator-of-all-0123456789"
ROTATED = "worker-after-rotation-0123456789"


def tokens(*more: str, without: Role | None = None) -> str:
    tables = [
        f'name = "{role.name.lower()}"\nrole = "{role.name.lower()}"\nruns = ["a-*"]\ntoken = "{secret}"'
        for role, secret in SECRETS.items()
        if role is not without
    ]
    tables.append(f'name = "all"\nrole = "operator"\ntoken = "{ANOTHER}"')
    return "\n".join(f"[[token]]\n{table}\n" for table in [*tables, *more])


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """Asks for tokens on both ports."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "tokens.toml").write_text(tokens())
    extra = (f"--tokens-file={folder / 'tokens.toml'}", "--http-tokens")
    with Coordinator(folder, state="memory:", extra=extra) as running:
        yield running
        muster.worker.close()
        log = running.log_path.read_text()
        assert "Traceback" not in log
        assert '"level": "error"' not in log
        for secret in (*SECRETS.values(), ANOTHER):
            assert secret not in log


@pytest.fixture
def connection(guarded: Coordinator) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(guarded.endpoint) as opened:
        arrive_alone(opened, "a-there")
        yield opened


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in [name for name in os.environ if name.startswith("MUSTER_")]:
        monkeypatch.delenv(name)
    yield monkeypatch
    muster.worker.close()
    channel._channels.clear()


def bearing(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


ALL = bearing(ANOTHER)


def call(connection: grpc.Channel, method: str, run_id: str, token: str | None) -> str:
    """Call a method for a run; the reason of the refusal, or the code without one, or OK."""
    service, name = method.strip("/").split("/")
    descriptor = next(one for one in SERVICES if one.full_name == service).methods_by_name[name]
    request: Any = GetMessageClass(descriptor.input_type)()
    if method.endswith("/Connect"):
        process = session_pb2.Process(rank=0, incarnation="i", host="h", pid=1)
        hello = session_pb2.Hello(run_id=run_id, processes=[process], protocol_version=1)
        request = session_pb2.ConnectRequest(hello=hello)
    elif method.endswith("/Operate"):
        request = store_pb2.OperateRequest(num_keys=store_pb2.NumKeysRequest(run_id=run_id))
    elif "run_id" in descriptor.input_type.fields_by_name:
        request.run_id = run_id
    metadata = bearing(token) if token is not None else ()
    kind = "stream_stream" if descriptor.client_streaming else "unary_stream"
    kind = kind if descriptor.server_streaming else "unary_unary"
    multi = getattr(connection, kind)(
        method, type(request).SerializeToString, GetMessageClass(descriptor.output_type).FromString
    )
    given = iter([request]) if kind == "stream_stream" else request
    try:
        answer = multi(given, metadata=metadata, timeout=PATIENCE)
        if kind != "unary_unary":
            next(answer)
            answer.cancel()
    except grpc.RpcError as error:
        return reason_of(error) if error.trailing_metadata() else error.code().name
    except StopIteration:
        pass
    return "OK"


def arrive_alone(connection: grpc.Channel, run_id: str) -> None:
    request = barrier_pb2.ArriveRequest(run_id=run_id, prefix="p", world_size=1, timeout_ms=5_000)
    barrier_pb2_grpc.BarrierServiceStub(connection).Arrive(request, metadata=ALL, timeout=PATIENCE)


def runs_of(connection: grpc.Channel, metadata=ALL) -> list[str]:
    stub = run_pb2_grpc.RunServiceStub(connection)
    found = stub.List(run_pb2.RunServiceListRequest(), metadata=metadata, timeout=PATIENCE)
    return [run.run_id for run in found.runs]


REFUSALS = ("TOKEN_MISSING", "TOKEN_UNKNOWN", "ROLE_TOO_LOW", "RUN_NOT_ALLOWED", "DEADLINE_EXCEEDED")
ABOUT_NO_RUN = (
    "/muster.v1.RunService/List",
    "/muster.v1.CoordinatorService/Status",
    "/muster.v1.CoordinatorService/Replicas",
)


@pytest.mark.parametrize("method", METHODS)
def test_each_call_needs_a_token_of_the_right_role_and_run(connection: grpc.Channel, method: str):
    before = runs_of(connection)
    run_id = f"a-{method.split('/')[1]}-{method.split('/')[2]}".replace(".", "-")
    assert call(connection, method, run_id, None) == "TOKEN_MISSING"
    assert call(connection, method, run_id, "unknown-0123456789") == "TOKEN_UNKNOWN"
    needed = RULES[method].role
    for role in Role:
        if role < needed:
            assert call(connection, method, run_id, SECRETS[role]) == "ROLE_TOO_LOW"
    if method not in ABOUT_NO_RUN:
        for role in Role:
            if role >= needed:
                assert call(connection, method, f"b{run_id}", SECRETS[role]) == "RUN_NOT_ALLOWED"
    assert runs_of(connection) == before, "nothing was touched"
    for role in Role:
        if role >= needed:
            # What the core says of an almost empty request is of no interest here.
            there = "a-there" if method.endswith("/Watch") else run_id
            assert call(connection, method, there, SECRETS[role]) not in REFUSALS


def test_lists_and_watches_show_the_runs_that_one_may_see(connection: grpc.Channel):
    stub = barrier_pb2_grpc.BarrierServiceStub(connection)
    for run_id in ("a-seen", "b-hidden"):
        arrive_alone(connection, run_id)
    viewer = bearing(SECRETS[Role.VIEWER])
    assert {"a-seen", "b-hidden"} <= set(runs_of(connection))
    assert all(run.startswith("a-") for run in runs_of(connection, viewer))
    assert "a-seen" in runs_of(connection, viewer)

    found = stub.List(barrier_pb2.BarrierServiceListRequest(), metadata=viewer, timeout=PATIENCE)
    assert {barrier.run_id for barrier in found.barriers} >= {"a-seen"}
    assert all(barrier.run_id.startswith("a-") for barrier in found.barriers)

    watch = run_pb2_grpc.RunServiceStub(connection).Watch(
        run_pb2.WatchRequest(), metadata=viewer, timeout=PATIENCE
    )
    shown = {next(watch).run.run_id}
    arrive_alone(connection, "b-later")
    arrive_alone(connection, "a-later")
    while "a-later" not in shown:
        shown.add(next(watch).run.run_id)
    watch.cancel()
    assert all(run.startswith("a-") for run in shown)


def test_health_is_open_and_reflection_is_not(connection: grpc.Channel):
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    health = health_pb2_grpc.HealthStub(connection)
    health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
    watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()
    stub = reflection_pb2_grpc.ServerReflectionStub(connection)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.ServerReflectionInfo(iter([request]), timeout=PATIENCE))
    assert reason_of(caught.value) == "TOKEN_MISSING"
    (answer,) = stub.ServerReflectionInfo(
        iter([request]), metadata=bearing(SECRETS[Role.VIEWER]), timeout=PATIENCE
    )
    assert answer.list_services_response.service


def test_http_asks_for_a_token_except_from_probes(guarded: Coordinator):
    assert guarded.get("/readyz") == (200, "ok\n")
    status, said = guarded.get("/metrics")
    assert (status, "none came" in said) == (401, True)
    assert guarded.get("/metrics", authorization="Bearer unknown-0123456789")[0] == 401
    status, said = guarded.get("/metrics", authorization=f"Bearer {SECRETS[Role.VIEWER]}")
    assert (status, "and not for all runs" in said) == (403, True)
    assert guarded.get("/metrics", authorization=f"Bearer {ANOTHER}")[0] == 200


# ---------------------------------------------------------------------- SDK and command


def barrier(endpoint: str, run_id: str = "a-sdk", rank: int = 0, world_size: int = 1) -> GrpcBarrier:
    return GrpcBarrier(rank, world_size, "p", endpoint, 20, 20, run_id=run_id, generation=0)


def node(endpoint: str, run_id: str = "a-sdk", nodes: int = 1) -> NodeConfig:
    return NodeConfig(
        endpoint=endpoint,
        run_id=run_id,
        address="h",
        min_nodes=nodes,
        max_nodes=nodes,
        join_timeout=30,
        last_call_timeout=1,
        keep_alive_timeout=10,
        connect_timeout=30,
        call_timeout=5,
    )


def test_sdk_and_command_show_their_token(guarded: Coordinator, environ: pytest.MonkeyPatch, tmp_path: Path):
    environ.setenv("MUSTER_TOKEN", SECRETS[Role.WORKER])
    barrier(guarded.endpoint).execute_barrier()
    store = CoordinatorStore(guarded.endpoint, "a-sdk")
    store.set("key", "value")
    assert store.get("key") == b"value"
    file = tmp_path / "token"
    file.write_text(f"{ANOTHER}\n")
    done = CliRunner().invoke(
        app, ["evict", "a-sdk", "0", "--dry-run", "-e", guarded.endpoint, f"--token-file={file}"]
    )
    assert done.exit_code == 0, done.stderr


@pytest.mark.parametrize(
    ("token", "run_id", "reason"),
    [
        (None, "a-x", "TOKEN_MISSING"),
        ("unknown-0123456789", "a-x", "TOKEN_UNKNOWN"),
        (SECRETS[Role.VIEWER], "a-x", "ROLE_TOO_LOW"),
        (SECRETS[Role.WORKER], "b-x", "RUN_NOT_ALLOWED"),
    ],
)
def test_who_is_not_let_in_is_told_so_at_once(
    guarded: Coordinator, environ: pytest.MonkeyPatch, token: str | None, run_id: str, reason: str
):
    if token is not None:
        environ.setenv("MUSTER_TOKEN", token)
    users: list[Callable[[], object]] = [
        lambda: barrier(guarded.endpoint, run_id),
        lambda: CoordinatorStore(guarded.endpoint, run_id).num_keys(),
        lambda: NodeMembership(node(guarded.endpoint, run_id)).join(),
    ]
    for user in users:
        with pytest.raises(RefusedError) as caught:
            user()
        assert caught.value.reason == reason
        assert token is None or token not in str(caught.value)
    done = CliRunner().invoke(app, ["close", run_id, "-e", guarded.endpoint])
    assert done.exit_code == Exit.FAILED
    assert done.stderr.startswith("Error: ")
    assert token is None or token not in done.stderr


@pytest.mark.parametrize(
    ("role", "run_id", "said"),
    [
        (Role.WORKER, "a-x", 'ok        token           "worker" has the role worker for the runs a-*'),
        (Role.WORKER, "b-x", "and MUSTER_RUN_ID is b-x"),
        (Role.VIEWER, "a-x", 'warning   token           "viewer" has the role viewer for the runs a-*'),
    ],
)
def test_the_doctor_says_what_a_token_is_too_little_for(
    guarded: Coordinator, environ: pytest.MonkeyPatch, role: Role, run_id: str, said: str
):
    environ.setenv("MUSTER_TOKEN", SECRETS[role])
    environ.setenv("MUSTER_RUN_ID", run_id)
    done = CliRunner().invoke(app, ["doctor", "-e", guarded.endpoint])
    assert done.exit_code == 0, done.stdout
    assert said in done.stdout


def test_who_needs_no_token_is_told_nothing_about_one(connection: grpc.Channel, tmp_path: Path):
    ask = coordinator_pb2.StatusRequest()
    guarded = coordinator_pb2_grpc.CoordinatorServiceStub(connection).Status(
        ask, metadata=ALL, timeout=PATIENCE
    )
    assert guarded.caller == coordinator_pb2.Caller(
        token_name="all", role=coordinator_pb2.ROLE_OPERATOR, run_patterns=["*"]
    )
    with (
        Coordinator(tmp_path, state="memory:") as coordinator,
        grpc.insecure_channel(coordinator.endpoint) as channel,
    ):
        status = coordinator_pb2_grpc.CoordinatorServiceStub(channel).Status(ask, timeout=PATIENCE)
        assert not status.HasField("caller")


# ---------------------------------------------------------------------- tokens that change


def test_a_token_is_rotated_while_a_barrier_waits(tmp_path: Path, environ: pytest.MonkeyPatch):
    """As an operator does it: the new one is made known, the clients get it, the old one goes."""
    table = f'name = "rotated"\nrole = "worker"\nruns = ["a-*"]\ntoken = "{ROTATED}"'
    file, mine = tmp_path / "tokens.toml", tmp_path / "token"
    file.write_text(tokens())
    mine.write_text(SECRETS[Role.WORKER])
    environ.setenv("MUSTER_TOKEN_FILE", str(mine))

    def put(path: Path, text: str, event: str = "tokens.reloaded") -> None:
        seen = len(coordinator.log(event)) if path == file else 0
        fresh = tmp_path / "fresh"
        fresh.write_text(text)
        fresh.replace(path)
        if path == file:
            until(lambda: len(coordinator.log(event)) > seen)

    extra = (f"--tokens-file={file}",)
    with Coordinator(tmp_path, session_ttl=5, extra=extra) as coordinator:
        first, second = (barrier(coordinator.endpoint, rank=rank, world_size=2) for rank in range(2))
        store = CoordinatorStore(coordinator.endpoint, "a-sdk")
        store.num_keys()
        # One node has a place in a round, and one waits for another to come.
        placed = NodeMembership(node(coordinator.endpoint, "a-placed"))
        placed.join()
        waiting, partner = (
            NodeMembership(node(coordinator.endpoint, "a-waiting", nodes=2)) for _ in range(2)
        )
        heard: queue.SimpleQueue[object] = queue.SimpleQueue()
        for wait in (first.vote, lambda: store.get("later"), waiting.join):
            threading.Thread(target=lambda wait=wait: heard.put(wait()), daemon=True).start()
        all_of_it = muster_view(coordinator)
        until(lambda: all_of_it("a-sdk").arrived == 1 and waiting._stream.connected)
        put(file, tokens(table))
        put(file, "not TOML", "tokens.kept")
        put(file, tokens(table))
        put(mine, ROTATED)
        sessions: list[Any] = [first._session, second._session, placed, waiting]
        calls = [session._stream.call for session in sessions]
        put(file, tokens(table, without=Role.WORKER))
        # Their streams are ended, and they come back with the new token.
        until(
            lambda: all(
                s._stream.call is not c and s._stream.connected for s, c in zip(sessions, calls, strict=True)
            )
        )
        assert second.vote().outcome.name == "RELEASED"
        store.set("later", b"value")
        assert partner.join().world_size == 2
        answers = [heard.get(timeout=PATIENCE) for _ in range(3)]
        assert b"value" in answers
        assert [one.world_size for one in answers if isinstance(one, Place)] == [2]
        assert [one.outcome.name for one in answers if isinstance(one, Decision)] == ["RELEASED"]
        for one in (placed, waiting, partner):
            one.leave("done")
        log = coordinator.log_path.read_text()
        assert "Traceback" not in log
        assert not any(secret in log for secret in (*SECRETS.values(), ROTATED, ANOTHER))
        assert [line["level"] for line in coordinator.logged("tokens.kept")] == ["error"]
        muster.worker.close()


def muster_view(coordinator: Coordinator) -> Callable[[str], barrier_pb2.Barrier]:
    connection = grpc.insecure_channel(coordinator.endpoint)
    stub = barrier_pb2_grpc.BarrierServiceStub(connection)

    def look(run_id: str) -> barrier_pb2.Barrier:
        request = barrier_pb2.BarrierServiceListRequest(run_id=run_id)
        found = stub.List(request, metadata=ALL, timeout=PATIENCE).barriers
        return found[0] if found else barrier_pb2.Barrier()

    return look


def test_every_kind_of_open_call_ends_when_its_token_is_taken_away(tmp_path: Path):
    file = tmp_path / "tokens.toml"
    file.write_text(tokens())
    with (
        Coordinator(tmp_path, state="memory:", extra=(f"--tokens-file={file}",)) as coordinator,
        grpc.insecure_channel(coordinator.endpoint) as connection,
    ):
        worker = bearing(SECRETS[Role.WORKER])
        process = session_pb2.Process(rank=0, incarnation="i", host="h", pid=1)
        hello = session_pb2.Hello(run_id="a-x", processes=[process], protocol_version=1)
        said: queue.SimpleQueue[session_pb2.ConnectRequest] = queue.SimpleQueue()
        said.put(session_pb2.ConnectRequest(hello=hello))
        session = session_pb2_grpc.SessionServiceStub(connection).Connect(
            iter(said.get, None), metadata=worker
        )
        assert next(session).HasField("welcome")
        join = rendezvous_pb2_grpc.RendezvousServiceStub(connection).Join(
            rendezvous_pb2.JoinRequest(
                run_id="a-x",
                node=rendezvous_pb2.Node(incarnation="n", address="h", pid=1),
                attempt=1,
                min_nodes=2,
                max_nodes=2,
                join_timeout_ms=60_000,
                last_call_timeout_ms=1_000,
                keep_alive_timeout_ms=5_000,
                protocol_version=1,
            ),
            metadata=worker,
        )
        assert next(join).HasField("standing")
        watch = run_pb2_grpc.RunServiceStub(connection).Watch(run_pb2.WatchRequest(), metadata=worker)
        next(watch)
        wait = store_pb2_grpc.StoreServiceStub(connection).Wait.future(
            store_pb2.WaitRequest(run_id="a-x", keys=["k"], timeout_ms=60_000), metadata=worker
        )
        file.write_text(tokens(without=Role.WORKER))
        for stream in (session, join, watch):
            with pytest.raises(grpc.RpcError) as caught:
                for _ in stream:
                    pass
            assert reason_of(caught.value) == "TOKEN_UNKNOWN"
        with pytest.raises(grpc.RpcError) as caught:
            wait.result(timeout=PATIENCE)
        assert reason_of(caught.value) == "TOKEN_UNKNOWN"
        said.put(None)  # type: ignore[arg-type]
        assert "Traceback" not in coordinator.log_path.read_text()


# ---------------------------------------------------------------------- peers that want to do harm


def support(module: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.support.{module}", *map(str, arguments)],
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


def test_a_flood_of_one_peer_is_slowed_down_and_another_runs_barriers_go_on(tmp_path: Path):
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
        told = json.loads(out)
        # What one burst and the rate allow; its streams had far more to say.
        assert 0 < told["heard"] <= rate * (1 + told["seconds"]) + told["streams"]
        assert told["said"] > told["heard"]


def test_connections_that_say_nothing_or_little_are_let_go_and_disturb_nobody(tmp_path: Path):
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


# ---------------------------------------------------------------------- what they may say

TAG = "<script>alert(1)</script>"
ESCAPES = "\x1b[2J\x1b]0;owned\x07\u202e\x9b31m\r"


def test_tags_and_escape_codes_are_shown_and_not_obeyed(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        with grpc.insecure_channel(coordinator.endpoint) as connection:
            request = barrier_pb2.ArriveRequest(
                run_id=TAG,
                prefix=TAG,
                host=TAG,
                world_size=2,
                timeout_ms=60_000,
                failure=f"{TAG}{ESCAPES}\nforged line",
            )
            stub = barrier_pb2_grpc.BarrierServiceStub(connection)
            stub.Arrive(request, timeout=PATIENCE)
            for field in ("run_id", "prefix", "host"):
                bad = barrier_pb2.ArriveRequest()
                bad.CopyFrom(request)
                setattr(bad, field, ESCAPES)
                with pytest.raises(grpc.RpcError) as caught:
                    stub.Arrive(bad, timeout=PATIENCE)
                assert reason_of(caught.value) == "INVALID_ARGUMENT"
                assert_harmless(some(caught.value.details()))
        said = [
            muster_command(coordinator.endpoint, *arguments)
            for arguments in (
                ("get", "runs"),
                ("get", "barriers", "-o", "wide"),
                ("get", "barriers", "-o", "json"),
                ("get", "members", TAG, "-o", "wide"),
                ("get", "runs", ESCAPES),
                ("describe", "run", TAG),
                ("describe", "barrier", TAG, TAG),
                ("describe", "member", TAG, "0"),
                ("abort", TAG, TAG, "--reason", ESCAPES),
                ("close", TAG, "--reason", f"{TAG}{ESCAPES}"),
                ("close", TAG),
            )
        ]
        for text in said:
            assert_harmless(text)
        assert any(TAG in text for text in said)
        # ESC stands there as four characters.
        assert "\\x1b[2J" in said[6]
        coordinator.stop()
        log = coordinator.log_path.read_text()
        assert_harmless(log)
        (decided,) = coordinator.log("barrier.decided")
        assert TAG in decided["reason"]
        assert "\\x1b[2J" in decided["reason"]


def muster_command(endpoint: str, *arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments, *(() if arguments[0] == "serve" else ("-e", endpoint))])
    return done.stdout + done.stderr


def assert_harmless(text: str) -> None:
    assert all(char.isprintable() or char == "\n" for char in text), ascii(text)
