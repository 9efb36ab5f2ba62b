"""Tokens, roles and runs against a real coordinator; and peers that want to do harm."""

import queue
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
from lab.patience import PATIENCE, until
from lab.processes.coordinator import Coordinator
from muster.service.cli.failure import Exit
from muster.service.cli.main import app
from muster.service.rpc.server import METHODS, SERVICES
from muster.service.security.access import RULES
from muster.service.security.grants import Role
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
from muster.worker.node.membership import NodeMembership, Place
from tests.support.node_config import node_config
from tests.support.rich_status import reason_of
from tests.support.tokens import ANOTHER, ROTATED, SECRETS, arrive_alone, bearing, tokens
from tests.support.waiters import until_called_again


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
    if "node_name" in descriptor.input_type.fields_by_name:
        request.node_name = "node-1"
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


def runs_of(connection: grpc.Channel, metadata=ALL) -> list[str]:
    stub = run_pb2_grpc.RunServiceStub(connection)
    found = stub.List(run_pb2.RunServiceListRequest(), metadata=metadata, timeout=PATIENCE)
    return [run.run_id for run in found.runs]


REFUSALS = (
    *("TOKEN_MISSING", "TOKEN_UNKNOWN", "ROLE_TOO_LOW", "RUN_NOT_ALLOWED", "NODE_NOT_ALLOWED"),
    "DEADLINE_EXCEEDED",
)
ABOUT_NO_RUN = (
    "/muster.v1.RunService/DrainNode",
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
        (SECRETS[Role.WATCHER], "a-x", "ROLE_TOO_LOW"),
        (SECRETS[Role.WORKER], "b-x", "RUN_NOT_ALLOWED"),
    ],
)
def test_caller_without_access_is_refused_at_once(
    guarded: Coordinator, environ: pytest.MonkeyPatch, token: str | None, run_id: str, reason: str
):
    if token is not None:
        environ.setenv("MUSTER_TOKEN", token)
    users: list[Callable[[], object]] = [
        lambda: barrier(guarded.endpoint, run_id),
        lambda: CoordinatorStore(guarded.endpoint, run_id).num_keys(),
        lambda: NodeMembership(node_config(guarded.endpoint, run_id)).join(),
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
        (Role.WORKER, "b-x", "and the run is b-x"),
        (Role.VIEWER, "a-x", 'warning   token           "viewer" has the role viewer for the runs a-*'),
        (Role.WATCHER, "a-x", '"watcher" has the role watcher for the runs a-* on the nodes node-1, spot-*'),
    ],
)
def test_doctor_names_the_calls_that_a_token_lacks_rights_for(
    guarded: Coordinator, environ: pytest.MonkeyPatch, role: Role, run_id: str, said: str
):
    environ.setenv("MUSTER_TOKEN", SECRETS[role])
    environ.setenv("MUSTER_RUN_ID", run_id)
    done = CliRunner().invoke(app, ["doctor", "-e", guarded.endpoint])
    assert done.exit_code == 0, done.stdout
    assert said in done.stdout


def test_status_names_the_caller_only_if_tokens_are_asked_for(connection: grpc.Channel, tmp_path: Path):
    ask = coordinator_pb2.StatusRequest()
    guarded = coordinator_pb2_grpc.CoordinatorServiceStub(connection).Status(
        ask, metadata=ALL, timeout=PATIENCE
    )
    assert guarded.caller == coordinator_pb2.Caller(
        token_name="all", role=coordinator_pb2.ROLE_OPERATOR, run_patterns=["*"]
    )
    guarded = coordinator_pb2_grpc.CoordinatorServiceStub(connection).Status(
        ask, metadata=bearing(SECRETS[Role.WATCHER]), timeout=PATIENCE
    )
    assert guarded.caller == coordinator_pb2.Caller(
        token_name="watcher",
        role=coordinator_pb2.ROLE_WATCHER,
        run_patterns=["a-*"],
        node_patterns=["node-1", "spot-*"],
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
        placed = NodeMembership(node_config(coordinator.endpoint, "a-placed"))
        placed.join()
        waiting, partner = (
            NodeMembership(node_config(coordinator.endpoint, "a-waiting", nodes=2)) for _ in range(2)
        )
        heard: queue.SimpleQueue[object] = queue.SimpleQueue()
        for wait in (first.vote, lambda: store.get("later"), waiting.join):
            threading.Thread(target=lambda wait=wait: heard.put(wait()), daemon=True).start()
        all_of_it = muster_view(coordinator)
        until(lambda: all_of_it("a-sdk").arrived == 1 and waiting._stream.connected)
        put(file, tokens(table))
        put(file, "not TOML", "tokens.kept")
        assert 'muster_reload_failed{what="tokens"} 1.0' in coordinator.get("/metrics")[1]
        put(file, tokens(table))
        put(mine, ROTATED)
        sessions: list[Any] = [first._session, second._session, placed, waiting]
        calls = [session._stream.call for session in sessions]
        put(file, tokens(table, without=Role.WORKER))
        # Their streams are ended, and they come back with the new token.
        until_called_again(sessions, calls)
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
