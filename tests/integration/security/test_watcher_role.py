"""The role of watchers against a real coordinator: the nodes and runs that a token lets them drain."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from lab.patience import PATIENCE
from lab.processes.coordinator import Coordinator
from muster.service.security.grants import Role
from muster.v1 import run_pb2, run_pb2_grpc, session_pb2, session_pb2_grpc
from tests.support.rich_status import reason_of
from tests.support.tokens import ANOTHER, SECRETS, arrive_alone, bearing, tokens
from tests.support.watching.ranks import rank_on

WATCHER = SECRETS[Role.WATCHER]
ALL = bearing(ANOTHER)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """Asks for tokens."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "tokens.toml").write_text(tokens())
    with Coordinator(folder, state="memory:", extra=(f"--tokens-file={folder / 'tokens.toml'}",)) as running:
        yield running
        log = running.log_path.read_text()
        assert "Traceback" not in log
        assert WATCHER not in log


@pytest.fixture
def connection(guarded: Coordinator) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(guarded.endpoint) as opened:
        yield opened


def drain(connection: grpc.Channel, name: str, token: str = WATCHER) -> list[tuple[str, bool]] | str:
    """Return each drained run, and whether it had been asked before; or the reason of the refusal."""
    request = run_pb2.DrainNodeRequest(node_name=name, stop=True, by="w", reason="spot", notice_id="i-7")
    stub = run_pb2_grpc.RunServiceStub(connection)
    try:
        found = stub.DrainNode(request, metadata=bearing(token), timeout=PATIENCE)
    except grpc.RpcError as error:
        return reason_of(error)
    return [(one.run_id, one.was_asked) for one in found.runs]


def is_asked(connection: grpc.Channel, run_id: str) -> bool:
    request = run_pb2.RunServiceGetRequest(run_id=run_id)
    found = run_pb2_grpc.RunServiceStub(connection).Get(request, metadata=ALL, timeout=PATIENCE)
    return found.run.HasField("save")


@pytest.mark.parametrize(
    "name", ["node-10", "Node-1", "node-1\n", "node-?", "*", "", "spot-\x1b[2J", "node-1" * 10_000]
)
def test_watcher_drains_no_node_but_its_own(connection: grpc.Channel, name: str):
    with rank_on(connection, "node-10", "a-next", metadata=ALL):
        assert drain(connection, name) == "NODE_NOT_ALLOWED"
        assert not is_asked(connection, "a-next")


@pytest.mark.parametrize("name", ["", "spot-\n", "node-1" * 10_000])
def test_name_that_no_node_can_have_is_refused_for_every_role(connection: grpc.Channel, name: str):
    assert drain(connection, name, SECRETS[Role.WORKER]) == "INVALID_ARGUMENT"
    assert drain(connection, f"spot-{'x' * 10_000}") == "INVALID_ARGUMENT"


def test_watcher_drains_only_runs_of_its_token(connection: grpc.Channel):
    runs = {"a-drained": "spot-7", "b-drained": "spot-7", "a-longer": "spot-70", "a-elsewhere": "node-2"}
    with ExitStack() as connected:
        for run_id, node_name in runs.items():
            connected.enter_context(rank_on(connection, node_name, run_id, metadata=ALL))
        assert drain(connection, "spot-7") == [("a-drained", False)]
        assert drain(connection, "spot-7") == [("a-drained", True)]
        assert drain(connection, "node-1") == []
        assert drain(connection, "node-2") == "NODE_NOT_ALLOWED"
        assert {run for run in runs if is_asked(connection, run)} == {"a-drained"}
        # A higher role drains any node, for the runs of its token.
        assert drain(connection, "node-2", SECRETS[Role.WORKER]) == [("a-elsewhere", False)]
        assert drain(connection, "spot-7", SECRETS[Role.OPERATOR]) == [("a-drained", True)]
        assert drain(connection, "spot-7", ANOTHER) == [("a-drained", True), ("b-drained", False)]


def test_watcher_speaks_for_no_rank(connection: grpc.Channel):
    process = session_pb2.Process(rank=0, incarnation="i", host="h", pid=1, node_name="node-1")
    hello = session_pb2.Hello(run_id="a-spoken", processes=[process], protocol_version=1)
    stream = session_pb2_grpc.SessionServiceStub(connection).Connect(
        iter([session_pb2.ConnectRequest(hello=hello)]), metadata=bearing(WATCHER), timeout=PATIENCE
    )
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    assert reason_of(caught.value) == "ROLE_TOO_LOW"
    with pytest.raises(grpc.RpcError) as caught:
        is_asked(connection, "a-spoken")
    assert reason_of(caught.value) == "RUN_NOT_FOUND"


@pytest.mark.parametrize("method", ["RequestSave", "CancelSave", "Evict", "Forget"])
def test_watcher_changes_no_run_by_its_id(connection: grpc.Channel, method: str):
    stub = run_pb2_grpc.RunServiceStub(connection)
    request = getattr(run_pb2, f"{method}Request")(run_id="a-kept")
    with rank_on(connection, "node-1", "a-kept", metadata=ALL):
        with pytest.raises(grpc.RpcError) as caught:
            getattr(stub, method)(request, metadata=bearing(WATCHER), timeout=PATIENCE)
        assert reason_of(caught.value) == "ROLE_TOO_LOW"
        assert not is_asked(connection, "a-kept")


@pytest.mark.parametrize("nodes", ['["node-2"]', '["node-1", "node-2"]', "removed"])
def test_calls_of_a_watcher_end_when_its_nodes_change(tmp_path: Path, nodes: str):
    file = tmp_path / "tokens.toml"
    file.write_text(tokens())
    with (
        Coordinator(tmp_path, state="memory:", extra=(f"--tokens-file={file}",)) as coordinator,
        grpc.insecure_channel(coordinator.endpoint) as channel,
    ):
        arrive_alone(channel, "a-there")
        watch = run_pb2_grpc.RunServiceStub(channel).Watch(run_pb2.WatchRequest(), metadata=bearing(WATCHER))
        next(watch)
        changed = tokens(without=Role.WATCHER)
        if nodes != "removed":
            changed = tokens().replace('["node-1", "spot-*"]', nodes)
        file.write_text(changed)
        with pytest.raises(grpc.RpcError) as caught:
            for _ in watch:
                pass
        assert reason_of(caught.value) == "TOKEN_UNKNOWN"
        assert drain(channel, "spot-7") == ("TOKEN_UNKNOWN" if nodes == "removed" else "NODE_NOT_ALLOWED")
