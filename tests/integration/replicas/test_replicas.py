"""Several coordinators, of which one leads: session, store, rendezvous and command find it, and the next."""

import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

import muster.worker
from lab.authority import Authority
from lab.patience import PATIENCE, until
from lab.processes.coordinator import MUSTER, Coordinator
from lab.processes.proxy import Proxy
from muster.client import replicas
from muster.service.cli.failure import Exit
from muster.service.cli.main import app
from muster.v1 import session_pb2 as pb
from muster.v1 import session_pb2_grpc
from muster.worker import ConnectError, CoordinatorStore, GrpcBarrier
from muster.worker.groups.group import Shape
from muster.worker.node.membership import NodeConfig, NodeMembership, Place
from muster.worker.session.session import SessionConfig
from muster.worker.session.sessions import session_for
from tests.support.meeting import in_thread
from tests.support.standby import Address, Standby
from tests.support.waiters import wait_for_arrivals, wait_until_asked

LONG = timedelta(seconds=PATIENCE)


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ports are used again, and what stood behind one is not what stands there now."""
    monkeypatch.setattr(replicas, "_all", {})
    yield
    muster.worker.close()


class Succession:
    """A coordinator that may be followed by another one, on the same state and elsewhere.

    Args:
        folder: of the state and the logs.
    """

    def __init__(self, folder: Path) -> None:
        for name in "ab":
            (folder / name).mkdir()
        state = f"sqlite:///{folder / 'muster.db'}"
        # Only the one that a test is about may give anyone up.
        self.first, self.second = (
            Coordinator(folder / name, state=state, session_ttl=PATIENCE) for name in "ab"
        )
        self._reserved = Address()
        self.second.port, self.second.endpoint = self._reserved.port, self._reserved.endpoint
        self.second.listens = self.second.endpoint
        self.first.start()
        self.standby = Standby(self.first.endpoint)
        self.endpoint = ",".join(one.endpoint for one in (self.standby, self.first, self.second))

    def happens(self) -> None:
        """The leader dies, nobody leads for a while, and then the other one does."""
        self.first.kill()
        self.standby.follow("")
        self.standby.holds()
        self._reserved.give_up()
        self.second.start()
        self.standby.follow(self.second.endpoint)

    def end(self) -> None:
        """Stop them all."""
        self.standby.stop()
        self._reserved.give_up()
        self.first.kill()
        self.second.kill()


@pytest.fixture
def succession(tmp_path: Path) -> Iterator[Succession]:
    made = Succession(tmp_path)
    try:
        yield made
        muster.worker.close()
    finally:
        made.end()


def futures_server(servicer: Any) -> tuple[int, grpc.Server]:
    """A session service of the test's own."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    session_pb2_grpc.add_SessionServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return port, server


def node(endpoint: str, address: str = "node-0", **more: Any) -> NodeMembership:
    terms: dict[str, Any] = {
        "run_id": "run",
        "address": address,
        "min_nodes": 1,
        "max_nodes": 1,
        "join_timeout": PATIENCE,
        "last_call_timeout": 1,
        "keep_alive_timeout": PATIENCE,
        "connect_timeout": PATIENCE,
        "call_timeout": PATIENCE,
    }
    return NodeMembership(NodeConfig(endpoint=endpoint, **terms | more))


def a_barrier(endpoint: str) -> None:
    GrpcBarrier(0, 1, "p", endpoint, PATIENCE, PATIENCE, run_id="run", generation=0).execute_barrier()


def a_store(endpoint: str) -> None:
    store = CoordinatorStore(endpoint, "run", LONG)
    store.set("k", "v")
    assert store.get("k") == b"v"


def a_round(endpoint: str) -> None:
    one = node(endpoint)
    try:
        assert one.join() == Place(0, 0, 1)
        assert one.ask_closed() is False
    finally:
        one.close("over", PATIENCE)
        one.leave("over")


def a_command(endpoint: str) -> None:
    answer = CliRunner().invoke(app, ["get", "runs", "--endpoint", endpoint, "--timeout", str(PATIENCE)])
    assert answer.exit_code == Exit.DONE, answer.output


CLIENTS = [a_barrier, a_store, a_round, a_command]


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    "before", ["dead", "hung", "standby", "two that name each other", "the dead are named"]
)
def test_the_leader_is_found_behind(coordinator: Coordinator, client: Callable[[str], None], before: str):
    with ExitStack() as stack:
        if before == "dead":
            others = [stack.enter_context(Address()).endpoint]
        elif before == "hung":
            others = [stack.enter_context(Address(hung=True)).endpoint]
        elif before == "standby":
            others = [stack.enter_context(Standby()).endpoint]
        elif before == "the dead are named":
            others = [stack.enter_context(Standby(stack.enter_context(Address()).endpoint)).endpoint]
        else:
            one, two = (stack.enter_context(Standby()) for _ in range(2))
            one.follow(two.endpoint)
            two.follow(one.endpoint)
            others = [one.endpoint, two.endpoint]
        client(",".join([*others, coordinator.endpoint]))


@pytest.mark.parametrize("client", CLIENTS)
def test_a_leader_that_was_not_given_is_followed(coordinator: Coordinator, client: Callable[[str], None]):
    with Standby(coordinator.endpoint) as standby:
        client(standby.endpoint)
        # What is known then is used by all that follows: nobody asks the standby twice.
        assert standby.asked[0][1] in ("", None)


def test_a_barrier_waits_through_a_change_of_the_leader(succession: Succession):
    two = [
        GrpcBarrier(rank, 2, "p", succession.endpoint, PATIENCE, PATIENCE, run_id="run", generation=0)
        for rank in range(2)
    ]
    waits = in_thread(two[0].execute_barrier)
    wait_for_arrivals(succession.first.endpoint, 1, "run")
    succession.happens()
    two[1].execute_barrier()
    waits.result(PATIENCE)
    assert ("Connect", succession.first.endpoint) in succession.standby.asked


def test_a_store_waits_through_a_change_of_the_leader(succession: Succession):
    store, other = (CoordinatorStore(succession.endpoint, "run", LONG) for _ in range(2))
    store.set("before", "v")
    waits = in_thread(lambda: store.get("k"))
    wait_until_asked(store)
    succession.happens()
    other.set("k", "v")
    assert waits.result(PATIENCE) == b"v"
    assert other.get("before") == b"v"


def test_a_node_waits_for_its_round_through_a_change_of_the_leader(succession: Succession):
    one, two = (node(succession.endpoint, f"node-{i}", min_nodes=2, max_nodes=2) for i in range(2))
    waits = in_thread(one.join)
    until(lambda: one._stream.connected)
    succession.happens()
    assert {two.join().rank, waits.result(PATIENCE).rank} == {0, 1}
    for each in (one, two):
        each.leave("over")


def test_a_place_is_held_and_given_up_through_a_change_of_the_leader(succession: Succession):
    one = node(succession.endpoint)
    assert one.join() == Place(0, 0, 1)
    succession.happens()
    one.close("over", PATIENCE)
    until(lambda: one._stream.connected)
    one.leave("over")
    assert one.closed


def test_a_goodbye_reaches_the_next_leader(succession: Succession):
    stays, leaves = (
        session_for(
            SessionConfig(endpoint=succession.endpoint, run_id="run", generation=0, rank=rank, host="here")
        )
        for rank in range(2)
    )
    shape = Shape(2)
    for session in (stays, leaves):
        session.join("p", shape, PATIENCE)
    decided = in_thread(lambda: stays.barrier("p", PATIENCE))
    succession.happens()
    leaves.close("done")
    assert decided.result(PATIENCE).outcome is muster.worker.Outcome.MEMBER_LOST


# ---------------------------------------------------------------------- nobody leads


def barrier_within(endpoint: str, seconds: float) -> None:
    GrpcBarrier(0, 1, "p", endpoint, seconds, seconds, run_id="run", generation=0)


def store_within(endpoint: str, seconds: float) -> None:
    CoordinatorStore(endpoint, "run", timedelta(seconds=seconds)).set("k", "v")


def round_within(endpoint: str, seconds: float) -> None:
    one = node(endpoint, connect_timeout=seconds)
    try:
        one.join()
    finally:
        one.leave("over")


def asking_within(endpoint: str, seconds: float) -> None:
    node(endpoint, connect_timeout=seconds).ask_closed()


@pytest.mark.parametrize("within", [barrier_within, store_within, round_within, asking_within])
def test_an_error_names_who_was_called_and_what_each_has_said(within: Callable[[str, float], None]):
    with Standby(hold=0.1) as standby, Address() as dead, pytest.raises(ConnectError) as caught:
        within(f"{standby.endpoint},{dead.endpoint}", 3.0)
    said = str(caught.value)
    assert f"{standby.endpoint}: UNAVAILABLE: this replica stands by: nobody leads now." in said
    assert f"{dead.endpoint}: UNAVAILABLE: failed to connect" in said


@pytest.mark.parametrize("within", [barrier_within, store_within, round_within, asking_within])
def test_while_nobody_leads_nobody_can_be_reached(within: Callable[[str, float], None]):
    """And nothing was refused: callers may try again."""
    with (
        Standby(hold=0.1) as one,
        Standby(hold=0.1) as two,
        pytest.raises(ConnectError, match=f"{one.endpoint}: UNAVAILABLE: this replica stands by") as caught,
    ):
        within(f"{one.endpoint},{two.endpoint}", 3.0)
    assert f"{two.endpoint}: UNAVAILABLE: this replica stands by" in str(caught.value)


@pytest.mark.parametrize("within", [barrier_within, store_within, round_within, asking_within])
def test_one_hung_replica_does_not_take_a_whole_timeout(
    coordinator: Coordinator, within: Callable[[str, float], None]
):
    with Address(hung=True) as hung:
        began = time.monotonic()
        try:
            within(f"{hung.endpoint},{coordinator.endpoint}", 3_600.0)
        except ConnectError as error:
            raise AssertionError(f"{time.monotonic() - began}") from error
        assert time.monotonic() - began < PATIENCE


# ---------------------------------------------------------------------- a leader that falls silent


@pytest.mark.parametrize("told", [0, 600])
def test_a_store_leaves_a_leader_that_falls_silent_during_a_call(
    coordinator: Coordinator, tmp_path: Path, told: int
):
    """No timeout ends the wait: only the keepalive does."""
    (tmp_path / "second").mkdir()
    with (
        Coordinator(tmp_path / "second", state="memory:") as second,
        Proxy(coordinator.port) as proxy,
        Standby(proxy.endpoint) as standby,
    ):
        endpoint = f"{proxy.endpoint},{standby.endpoint}"
        replicas.replicas_of(endpoint).learn([], told)
        store = CoordinatorStore(endpoint, "run", timedelta(0))
        store.set("first", "v")
        waits = in_thread(lambda: store.get("k"))
        CoordinatorStore(coordinator.endpoint, "run").wait(["first"])
        began = time.monotonic()
        proxy.black_hole()
        standby.holds()
        print(f"noticed after {time.monotonic() - began:.1f} s")
        standby.follow(second.endpoint)
        CoordinatorStore(second.endpoint, "run").set("k", "v")
        assert waits.result(PATIENCE) == b"v"


class Welcoming(session_pb2_grpc.SessionServiceServicer):
    """A leader that tells of its successor, and is gone."""

    def __init__(self, successor: str) -> None:
        self._successor = successor
        self.sessions = 0

    def Connect(self, requests: Any, context: Any) -> Any:  # noqa: N802
        next(requests)
        self.sessions += 1
        welcome = pb.Welcome(
            epoch=1, session_ttl_ms=10_000, ordinals=[1 << 32], replicas=[self._successor], keepalive_ms=900
        )
        yield pb.ConnectResponse(welcome=welcome)
        yield pb.ConnectResponse(drain=pb.Drain(retry_after_ms=3_600_000))


def test_a_welcome_tells_of_the_other_replicas_and_the_keepalive(coordinator: Coordinator):
    """And a drain of one of several is no reason to wait."""
    port, server = futures_server(Welcoming(coordinator.endpoint))
    try:
        a_barrier(f"127.0.0.1:{port}")
        known = replicas.replicas_of(f"127.0.0.1:{port}")
        assert known.target("x:1").keepalive_ms == 900
        assert known.known()[0] == coordinator.endpoint
    finally:
        server.stop(None)


# ---------------------------------------------------------------------- certificates and names


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    made = Authority(tmp_path)
    monkeypatch.setenv("MUSTER_TLS_CA", str(made.ca))
    return made


def secured(folder: Path, authority: Authority, *hosts: str) -> Coordinator:
    """A coordinator whose certificate is for these names alone."""
    pair = authority.issue("leader", *hosts)
    (folder / "leader").mkdir()
    extra = (f"--tls-cert={pair.cert}", f"--tls-key={pair.key}")
    return Coordinator(folder / "leader", state="memory:", extra=extra)


@pytest.mark.parametrize("client", CLIENTS)
def test_learned_address_shows_a_certificate_of_the_endpoints_host(
    tmp_path: Path, authority: Authority, client: Callable[[str], None]
):
    """The address of the leader is 127.0.0.1, which its certificate does not name."""
    pair = authority.issue("standby", "localhost")
    server = grpc.ssl_server_credentials([(pair.key.read_bytes(), pair.cert.read_bytes())])
    with (
        secured(tmp_path, authority, "localhost") as leader,
        Standby(leader.endpoint, credentials=server) as standby,
    ):
        client(f"localhost:{standby.port}")
        assert standby.asked, "its certificate is for localhost alone, and was taken"


@pytest.mark.parametrize("within", [barrier_within, store_within, round_within, asking_within])
def test_a_replica_with_the_certificate_of_another_name_is_none(
    tmp_path: Path, authority: Authority, within: Callable[[str, float], None]
):
    with (
        secured(tmp_path, authority, "localhost") as leader,
        Address() as dead,
        pytest.raises(ConnectError, match="the coordinator's certificate is for another name than the"),
    ):
        within(f"{leader.endpoint},{dead.endpoint}", 3.0)


@pytest.mark.parametrize("client", CLIENTS)
def test_the_name_in_the_environment_wins_at_every_replica(
    tmp_path: Path, authority: Authority, client: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MUSTER_TLS_SERVER_NAME", "muster.example")
    with secured(tmp_path, authority, "muster.example") as leader, Address() as dead:
        client(f"{dead.endpoint},{leader.endpoint}")


@pytest.mark.parametrize("client", CLIENTS)
def test_a_name_stands_for_several_addresses_and_the_certificate_is_for_the_name(
    tmp_path: Path, authority: Authority, client: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
):
    """Nobody is at the first of them."""
    name = "muster.invalid"
    with secured(tmp_path, authority, name) as leader:
        addresses = ["127.0.0.2", "127.0.0.1"]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, leader.port)) for one in addresses]
        asked = socket.getaddrinfo

        def look_up(host: str, *arguments: Any, **more: Any) -> Any:
            return found if host == name else asked(host, *arguments, **more)

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        client(f"{name}:{leader.port}")


# ---------------------------------------------------------------------- the command


def command(*arguments: str) -> tuple[int, str]:
    answer = CliRunner().invoke(app, list(arguments))
    return answer.exit_code, answer.output


def test_a_command_says_that_nobody_leads_when_its_time_is_over():
    with Standby(hold=0.3) as standby, Standby(hold=0.3) as other, Address() as dead:
        endpoint = ",".join(one.endpoint for one in (standby, dead, other))
        began = time.monotonic()
        code, said = command("get", "runs", "--endpoint", endpoint, "--timeout", "3")
        assert time.monotonic() - began >= 2.5
    assert code == Exit.UNREACHABLE
    assert f"Error: no coordinator of {endpoint} leads" in said
    assert f"{standby.endpoint}: this replica stands by" in said
    assert f"{other.endpoint}: this replica stands by" in said
    assert f"{dead.endpoint}: failed to connect" in said
    assert "next:" in said


def test_a_command_says_at_once_that_nobody_can_be_reached():
    with Address() as one, Address() as two:
        code, said = command(
            "get", "runs", "--endpoint", f"{one.endpoint},{two.endpoint}", "--timeout", "3600"
        )
    assert code == Exit.UNREACHABLE
    assert f"Error: no coordinator of {one.endpoint},{two.endpoint} can be reached" in said
    assert f"{one.endpoint}: failed to connect" in said
    assert f"{two.endpoint}: failed to connect" in said


def test_a_command_waits_for_the_next_leader(coordinator: Coordinator):
    with Standby() as standby:
        answer = in_thread(
            lambda: command("get", "runs", "--endpoint", standby.endpoint, "--timeout", str(PATIENCE))
        )
        standby.holds()
        standby.follow(coordinator.endpoint)
        code, said = answer.result(PATIENCE)
    assert (code, coordinator.endpoint in said or "no runs" in said) == (Exit.DONE, True)


def test_what_was_refused_by_the_leader_is_not_asked_elsewhere(coordinator: Coordinator):
    with Standby() as standby:
        endpoint = f"{coordinator.endpoint},{standby.endpoint}"
        code, said = command("describe", "run", "none", "--endpoint", endpoint)
        assert (code, standby.asked) == (Exit.FAILED, [])
    assert "none" in said


def test_a_bad_part_of_an_endpoint_is_named():
    code, said = command("get", "runs", "--endpoint", "a:1,b")
    assert code == Exit.USAGE
    assert '"b" is not HOST:PORT' in said


def test_a_watch_goes_on_at_the_next_leader(succession: Succession):
    a_barrier(succession.endpoint)
    with subprocess.Popen(
        [MUSTER, "get", "runs", "--watch", "--output=json", f"--endpoint={succession.endpoint}"],
        stdout=subprocess.PIPE,
        text=True,
    ) as watch:
        assert watch.stdout is not None
        try:
            assert json.loads(watch.stdout.readline())["run_id"] == "run"
            succession.happens()
            GrpcBarrier(0, 1, "p", succession.endpoint, PATIENCE, PATIENCE, run_id="later", generation=0)
            for line in watch.stdout:
                if json.loads(line)["run_id"] == "later":
                    break
            else:
                raise AssertionError("the watch has ended")
        finally:
            watch.send_signal(signal.SIGINT)


class Breaking(grpc.GenericRpcHandler):
    """Takes every call, and loses it."""

    def service(self, handler_call_details: Any) -> Any:
        def lose(_: bytes, context: grpc.ServicerContext) -> bytes:
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

        return grpc.unary_unary_rpc_method_handler(lose)


def test_what_may_have_been_done_is_not_done_again_elsewhere(coordinator: Coordinator):
    """An abort that was lost on its way back would end the next barrier, too; a look may be taken again."""
    a_barrier(coordinator.endpoint)
    server = grpc.server(futures.ThreadPoolExecutor(4), handlers=[Breaking()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        where = f"--endpoint=127.0.0.1:{port},{coordinator.endpoint}"
        code, said = command("abort", "run", "p", where)
        assert code == Exit.UNREACHABLE
        assert "Socket closed" in said
        assert "whether the barrier was aborted is unknown; see: muster describe barrier run p" in said
        assert command("describe", "barrier", "run", "p", where)[0] == Exit.DONE
    finally:
        server.stop(None)
