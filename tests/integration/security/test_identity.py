"""Service accounts against a real coordinator: what is admitted, and what ends when a token expires."""

import http.server
import queue
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

import muster.worker
from lab.authority import Authority
from lab.patience import PATIENCE, until
from lab.processes.coordinator import Coordinator, free_port
from lab.processes.relay import Relay
from muster.client import credentials
from muster.service.cli.failure import Exit
from muster.service.cli.main import app
from muster.v1 import run_pb2, run_pb2_grpc
from muster.worker import CoordinatorStore, GrpcBarrier, RefusedError
from muster.worker.decision import Decision
from muster.worker.node.membership import NodeMembership
from tests.support.issuer import URL, Issuer, forged, key, public_pem
from tests.support.node_config import node_config
from tests.support.rich_status import reason_of
from tests.support.waiters import until_called_again

ISSUER = Issuer()
OPERATOR = "operator-of-all-0123456789"
LIFE = 8.0
"""Seconds of a token that expires while it is used: enough to come in with it on a slow machine, too."""

RULES = f"""
[[token]]
name = "all"
role = "operator"
token = "{OPERATOR}"

[[service_account]]
namespace = "team-a"
account = "*"
role = "worker"
runs = ["team-a-*"]

[[service_account]]
namespace = "monitoring"
account = "prometheus"
role = "viewer"

[[service_account]]
namespace = "muster"
account = "watcher"
role = "watcher"
runs = ["team-a-*"]
"""


def tokens_toml(keys: str, leeway: float = 0.0) -> str:
    return f'[[issuer]]\nname = "cluster"\nurl = "{URL}"\nleeway = {leeway}\n{keys}\n{RULES}'


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """With the keys in a file, and tokens on both ports."""
    folder = tmp_path_factory.mktemp("guarded")
    ISSUER.publish(folder / "keys.json")
    (folder / "tokens.toml").write_text(tokens_toml(f'keys_file = "{folder / "keys.json"}"'))
    extra = (f"--tokens-file={folder / 'tokens.toml'}", "--http-tokens")
    with Coordinator(folder, state="memory:", extra=extra) as running:
        yield running
        muster.worker.close()
        log = running.log_path.read_text()
        assert "Traceback" not in log
        assert OPERATOR not in log


def barrier(endpoint: str, run_id: str = "team-a-1", rank: int = 0, world_size: int = 1) -> GrpcBarrier:
    return GrpcBarrier(rank, world_size, "p", endpoint, 60, 60, run_id=run_id, generation=0)


def put(file: Path, token: str) -> None:
    """Replace it whole, as a kubelet does."""
    fresh = file.with_suffix(".fresh")
    fresh.write_text(token)
    fresh.replace(file)


def runs_of(coordinator: Coordinator) -> set[str]:
    with grpc.insecure_channel(coordinator.endpoint) as connection:
        found = run_pb2_grpc.RunServiceStub(connection).List(
            run_pb2.RunServiceListRequest(),
            metadata=(("authorization", f"Bearer {OPERATOR}"),),
            timeout=PATIENCE,
        )
    return {run.run_id for run in found.runs}


def test_a_pod_is_let_in_as_its_service_account(
    guarded: Coordinator, environ: pytest.MonkeyPatch, tmp_path: Path
):
    file = tmp_path / "token"
    put(file, ISSUER.token("team-a/trainer"))
    environ.setenv("MUSTER_TOKEN_FILE", str(file))
    barrier(guarded.endpoint).execute_barrier()
    done = CliRunner().invoke(app, ["doctor", "-e", guarded.endpoint])
    assert '"team-a/trainer" has the role worker for the runs team-a-*' in done.stdout
    viewer = f"Bearer {ISSUER.token('monitoring/prometheus')}"
    assert guarded.get("/metrics", authorization=viewer)[0] == 200


def test_sdk_and_command_take_a_token_from_a_helper(
    guarded: Coordinator, environ: pytest.MonkeyPatch, tmp_path: Path
):
    file = tmp_path / "token"
    put(file, ISSUER.token("team-a/trainer"))
    environ.setenv("MUSTER_TOKEN_COMMAND", f"cat '{file}'")
    barrier(guarded.endpoint, "team-a-helped").execute_barrier()
    environ.delenv("MUSTER_TOKEN_COMMAND")
    options = ["get", "runs", "-e", guarded.endpoint, "--token-command"]
    done = CliRunner().invoke(app, [*options, f"cat '{file}'"])
    assert (done.exit_code, "team-a-helped" in done.stdout) == (0, True), done.stderr
    done = CliRunner().invoke(app, [*options, "false"])
    assert done.exit_code == Exit.USAGE
    assert done.stderr == "Error: --token-command: no token: false ended with 1; what it said is on stderr.\n"


def refused_since(coordinator: Coordinator, began: str) -> list[dict[str, Any]]:
    """The refusals in the log since then: it is written aside, and those of another test may come late."""
    return [line for line in coordinator.log("token.refused") if line["timestamp"] >= began]


def lasting(issuer: Issuer, *said: Any, **more: Any) -> str:
    """A token that is made when the tests are collected, and must be good when one of them has its turn."""
    return issuer.token(*said, seconds=86_400.0, **more)


ON_NODE: dict[str, Any] = {
    "kubernetes.io": {"node": {"name": "node-1", "uid": "1"}, "pod": {"name": "w", "uid": "2"}}
}
"""The claims of a token that Kubernetes made for a pod on that node."""
CLAIMS = {"iss": URL, "aud": "muster", "sub": "system:serviceaccount:team-a:trainer", "exp": 4e9}
BAD: dict[str, tuple[str, str, str]] = {
    "wrong audience": (lasting(ISSUER, aud="vault"), "TOKEN_UNKNOWN", "aud"),
    "expired": (ISSUER.token(seconds=-1), "TOKEN_EXPIRED", "exp"),
    "not yet valid": (lasting(ISSUER, nbf=4e9), "TOKEN_UNKNOWN", "nbf"),
    "alg none": (forged({"alg": "none"}, CLAIMS), "TOKEN_UNKNOWN", "alg"),
    "HS256 with the public key": (
        forged({"alg": "HS256", "kid": "first"}, CLAIMS, public_pem(ISSUER.private)),
        "TOKEN_UNKNOWN",
        "alg",
    ),
    "forged": (lasting(Issuer(private=key("thief"))), "TOKEN_UNKNOWN", "signature"),
    "unknown key": (lasting(ISSUER, headers={"kid": "other"}), "TOKEN_UNKNOWN", "kid"),
    "another issuer": (lasting(Issuer("https://other")), "TOKEN_UNKNOWN", "issuer"),
    "another namespace": (lasting(ISSUER, "team-b/trainer"), "TOKEN_UNKNOWN", "rules"),
    "role too low": (lasting(ISSUER, "monitoring/prometheus"), "ROLE_TOO_LOW", "role"),
    "run not allowed": (lasting(ISSUER, "team-a/trainer"), "RUN_NOT_ALLOWED", "run"),
    "watcher without a node": (lasting(ISSUER, "muster/watcher"), "TOKEN_UNKNOWN", "node"),
    "watcher": (lasting(ISSUER, "muster/watcher", **ON_NODE), "ROLE_TOO_LOW", "role"),
    "garbage": ("garbage-0123456789", "TOKEN_UNKNOWN", "shape"),
}


@pytest.mark.parametrize("case", BAD)
def test_caller_without_access_changes_nothing_and_is_logged(
    guarded: Coordinator, environ: pytest.MonkeyPatch, case: str
):
    token, reason, check = BAD[case]
    run_id = f"{case.replace(' ', '-')}-of-b"
    environ.setenv("MUSTER_TOKEN", token)
    began = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    for user in (
        lambda: barrier(guarded.endpoint, run_id),
        lambda: CoordinatorStore(guarded.endpoint, run_id).set("key", "value"),
        lambda: NodeMembership(node_config(guarded.endpoint, run_id)).join(),
    ):
        with pytest.raises(RefusedError) as caught:
            user()
        assert caught.value.reason == reason
    done = CliRunner().invoke(app, ["close", run_id, "-e", guarded.endpoint])
    assert done.exit_code == Exit.FAILED, done.stderr
    if reason.startswith("TOKEN"):
        status, said = guarded.get("/api/runs", authorization=f"Bearer {token}")
        assert status == 401, said
    assert run_id not in runs_of(guarded)
    until(lambda: len(refused_since(guarded, began)) >= 3)
    lines = refused_since(guarded, began)
    assert {(line["reason"], line["check"]) for line in lines} == {(reason, check)}
    log = guarded.log_path.read_text()
    for part in [part for part in token.split(".") if len(part) > 30]:
        assert part not in log
        assert part not in str(caught.value)


def test_watcher_drains_the_node_of_its_own_token(guarded: Coordinator):
    metadata = (("authorization", f"Bearer {ISSUER.token('muster/watcher', **ON_NODE)}"),)
    with grpc.insecure_channel(guarded.endpoint) as connection:
        stub = run_pb2_grpc.RunServiceStub(connection)

        def drain(name: str) -> run_pb2.DrainNodeResponse:
            request = run_pb2.DrainNodeRequest(node_name=name, by="watcher", reason="spot")
            return stub.DrainNode(request, metadata=metadata, timeout=PATIENCE)

        assert not drain("node-1").runs
        for other in ("node-10", "*", "node-1\n"):
            with pytest.raises(grpc.RpcError) as caught:
                drain(other)
            assert reason_of(caught.value) == "NODE_NOT_ALLOWED"


# ---------------------------------------------------------------------- tokens that expire


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_a_token_is_rotated_and_the_old_one_expires_while_a_barrier_waits(
    tmp_path: Path, authority: Authority, environ: pytest.MonkeyPatch
):
    keys, file, mine = tmp_path / "keys.json", tmp_path / "tokens.toml", tmp_path / "token"
    ISSUER.publish(keys)
    file.write_text(tokens_toml(f'keys_file = "{keys}"'))
    pair = authority.issue("server")
    environ.setenv("MUSTER_TLS_CA", str(authority.ca))
    environ.setenv("MUSTER_TOKEN_FILE", str(mine))
    extra = (f"--tokens-file={file}", f"--tls-cert={pair.cert}", f"--tls-key={pair.key}")
    with Coordinator(tmp_path, session_ttl=60, extra=extra) as coordinator:
        put(mine, ISSUER.token(seconds=LIFE))
        begun = time.time()
        first, second = (barrier(coordinator.endpoint, rank=rank, world_size=2) for rank in range(2))
        store = CoordinatorStore(coordinator.endpoint, "team-a-1")
        store.num_keys()
        placed = NodeMembership(node_config(coordinator.endpoint, "team-a-placed"))
        placed.join()
        heard: queue.SimpleQueue[object] = queue.SimpleQueue()
        for wait in (first.vote, lambda: store.get("later")):
            threading.Thread(target=lambda wait=wait: heard.put(wait()), daemon=True).start()
        sessions: list[Any] = [first._session, second._session, placed]
        calls = [session._stream.call for session in sessions]
        put(mine, ISSUER.token())
        # What is open is not disturbed before the old one ends.
        until(lambda: any(s._stream.call is not call for s, call in zip(sessions, calls, strict=True)))
        assert time.time() >= begun + LIFE - 0.1
        until_called_again(sessions, calls)
        assert second.vote().outcome.name == "RELEASED"
        store.set("later", b"value")
        answers = [heard.get(timeout=PATIENCE) for _ in range(2)]
        assert b"value" in answers
        assert [one.outcome.name for one in answers if isinstance(one, Decision)] == ["RELEASED"]
        placed.leave("done")
        lines = coordinator.logged("token.ended", 3)
        assert {line["check"] for line in lines} == {"exp"}
        assert "the token of team-a/trainer expired at" in lines[0]["message"]
        assert "Traceback" not in coordinator.log_path.read_text()
        muster.worker.close()


def test_a_token_that_was_not_rotated_ends_the_session_with_words(
    tmp_path: Path, environ: pytest.MonkeyPatch
):
    ISSUER.publish(tmp_path / "keys.json")
    file = tmp_path / "tokens.toml"
    file.write_text(tokens_toml(f'keys_file = "{tmp_path / "keys.json"}"'))
    environ.setattr(credentials, "TOKEN_PATIENCE", 1.0)
    mine = tmp_path / "token"
    environ.setenv("MUSTER_TOKEN_FILE", str(mine))
    with Coordinator(
        tmp_path, state="memory:", session_ttl=60, extra=(f"--tokens-file={file}",)
    ) as coordinator:
        put(mine, ISSUER.token(seconds=LIFE))
        alone = barrier(coordinator.endpoint, world_size=2)
        with pytest.raises(RefusedError, match=r"expired .* ago, .* it was not rotated") as caught:
            alone.execute_barrier()
        assert caught.value.reason == "TOKEN_EXPIRED"
        assert "MUSTER_TOKEN_FILE" in str(caught.value)


def test_a_relay_asks_for_the_same_tokens_and_ends_with_them(tmp_path: Path, environ: pytest.MonkeyPatch):
    ISSUER.publish(tmp_path / "keys.json")
    file, up, mine = tmp_path / "tokens.toml", tmp_path / "up", tmp_path / "token"
    file.write_text(tokens_toml(f'keys_file = "{tmp_path / "keys.json"}"'))
    put(up, ISSUER.token("team-a/relay"))
    environ.setenv("MUSTER_TOKEN_FILE", str(up))
    extra = (f"--tokens-file={file}",)
    with Coordinator(tmp_path, state="memory:", extra=extra) as coordinator:
        address = f"127.0.0.1:{free_port()}"
        with Relay(tmp_path, coordinator.endpoint, listen=address, extra=extra):
            environ.setenv("MUSTER_TOKEN_FILE", str(mine))
            put(mine, ISSUER.token("team-b/trainer"))
            with pytest.raises(RefusedError, match="team-b/trainer has no grant"):
                barrier(address)
            put(mine, ISSUER.token(seconds=LIFE))
            first, second = (barrier(address, rank=rank, world_size=2) for rank in range(2))
            put(mine, ISSUER.token())
            sessions: list[Any] = [first._session, second._session]
            calls = [session._stream.call for session in sessions]
            until_called_again(sessions, calls)
            thread = threading.Thread(target=first.execute_barrier)
            thread.start()
            second.execute_barrier()
            thread.join()
            muster.worker.close()


def test_a_relays_own_token_is_rotated_while_its_ranks_wait(tmp_path: Path, environ: pytest.MonkeyPatch):
    """As in torchrun's agent, whose relay shows the pod's token for all ranks of the pod."""
    ISSUER.publish(tmp_path / "keys.json")
    file, up = tmp_path / "tokens.toml", tmp_path / "up"
    file.write_text(tokens_toml(f'keys_file = "{tmp_path / "keys.json"}"'))
    environ.setenv("MUSTER_TOKEN_FILE", str(up))
    with Coordinator(
        tmp_path, state="memory:", session_ttl=60, extra=(f"--tokens-file={file}",)
    ) as coordinator:
        put(up, ISSUER.token(seconds=LIFE))
        with Relay(tmp_path, coordinator.endpoint) as relay:
            first, second = (barrier(relay.listen, rank=rank, world_size=2) for rank in range(2))
            heard: queue.SimpleQueue[Decision] = queue.SimpleQueue()
            threading.Thread(target=lambda: heard.put(first.vote()), daemon=True).start()
            put(up, ISSUER.token())
            coordinator.logged("token.ended")
            assert second.vote().outcome.name == "RELEASED"
            assert heard.get(timeout=PATIENCE).outcome.name == "RELEASED"
            muster.worker.close()


# ---------------------------------------------------------------------- keys that cannot be had


class Handler(http.server.BaseHTTPRequestHandler):
    """An API server's keys."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(ISSUER.jwks)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_keys_that_cannot_be_had_at_the_start_are_fetched_later(tmp_path: Path, environ: pytest.MonkeyPatch):
    port = free_port()
    file = tmp_path / "tokens.toml"
    file.write_text(tokens_toml(f'keys_url = "http://127.0.0.1:{port}/jwks"'))
    with Coordinator(
        tmp_path, state="memory:", session_ttl=60, extra=(f"--tokens-file={file}",)
    ) as coordinator:
        (line,) = coordinator.logged("keys.unavailable")
        assert f"http://127.0.0.1:{port}/jwks cannot be reached" in line["reason"]
        assert "Until then its tokens are refused" in line["reason"]
        # Static tokens go on as ever.
        assert runs_of(coordinator) == set()
        environ.setenv("MUSTER_TOKEN", ISSUER.token())
        done = CliRunner().invoke(app, ["doctor", "-e", coordinator.endpoint])
        assert 'the keys of the issuer "cluster"' in done.stdout
        assert "cannot be had" in done.stdout
        with (
            grpc.insecure_channel(coordinator.endpoint) as connection,
            pytest.raises(grpc.RpcError) as caught,
        ):
            run_pb2_grpc.RunServiceStub(connection).List(
                run_pb2.RunServiceListRequest(),
                metadata=(("authorization", f"Bearer {ISSUER.token()}"),),
                timeout=PATIENCE,
            )
        assert reason_of(caught.value) == "KEYS_UNAVAILABLE"
        with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as source:
            threading.Thread(target=source.serve_forever, daemon=True).start()
            # A worker that begins meanwhile comes in by itself.
            barrier(coordinator.endpoint).execute_barrier()
            source.shutdown()
        assert [line["issuer"] for line in coordinator.logged("keys.fetched")] == ["cluster"]


@pytest.mark.parametrize("content", [None, "", '{"keys": []}'])
def test_a_file_of_keys_that_cannot_be_used_ends_the_start(tmp_path: Path, content: str | None):
    keys, file = tmp_path / "keys.json", tmp_path / "tokens.toml"
    if content is not None:
        keys.write_text(content)
    file.write_text(tokens_toml(f'keys_file = "{keys}"'))
    coordinator = Coordinator(tmp_path, state="memory:", extra=(f"--tokens-file={file}",))
    coordinator.begin()
    assert coordinator.ended() == 1
    assert str(keys) in coordinator.log_path.read_text()
