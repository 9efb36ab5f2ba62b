"""The SDK calls a relay's socket before all others, shows it nothing, and does without it when it is gone."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from lab.patience import PATIENCE, until
from muster.client.replicas import replicas_of
from muster.v1 import common_pb2, rendezvous_pb2, session_pb2_grpc, store_pb2
from muster.v1 import session_pb2 as pb
from muster.worker import CoordinatorStore, MusterError, init_method
from muster.worker.barriers import GrpcBarrier
from muster.worker.decision import Outcome
from muster.worker.groups.group import Shape
from muster.worker.node.membership import NodeConfig, NodeMembership, Place
from muster.worker.node.relay import NodeRelay
from muster.worker.session import sessions
from muster.worker.session.session import Session, SessionConfig
from tests.support.rich_status import rich_status

TOKEN = "s3cr3t-0123456789"
SOON = 5.0
"""Seconds within which another is found. A second is what it should take; one that waits takes ten."""


def written(message: Message) -> bytes:
    return message.SerializeToString()


class Peer(session_pb2_grpc.SessionServiceServicer):
    """Answers as a coordinator or a relay does, for a run of one rank or one node.

    Args:
        address: where it listens.
        replicas: the addresses that its Welcome names.
    """

    def __init__(self, address: str, replicas: tuple[str, ...] = ()) -> None:
        self._replicas = replicas
        self.shown: list[str | None] = []
        """The ``authorization`` header of each call."""
        self.relayed: list[bool] = []
        """Whether it came from a relay, which calls on gRPC's asyncio side."""
        self.refuses: grpc.Status | None = None
        self.session_ttl_ms = 10_000
        self._server = grpc.server(ThreadPoolExecutor(8))
        session_pb2_grpc.add_SessionServiceServicer_to_server(self, self._server)
        more = [grpc.method_handlers_generic_handler(*service) for service in self._more().items()]
        self._server.add_generic_rpc_handlers(more)
        port = self._server.add_insecure_port(address)
        self.address = address if address.startswith("unix:") else f"127.0.0.1:{port}"
        self._server.start()

    def stop(self) -> None:
        """End all streams, and be called no more."""
        self._server.stop(None).wait(PATIENCE)

    def _look(self, context: grpc.ServicerContext) -> None:
        metadata = {str(key): str(value) for key, value in context.invocation_metadata()}
        self.shown.append(metadata.get("authorization"))
        self.relayed.append("asyncio" in metadata["user-agent"])
        if self.refuses is not None:
            context.abort_with_status(self.refuses)

    def Connect(self, requests: Iterator[pb.ConnectRequest], context: Any) -> Any:  # noqa: N802
        self._look(context)
        for request in requests:
            kind = request.WhichOneof("message")
            if kind == "hello":
                yield pb.ConnectResponse(
                    welcome=pb.Welcome(
                        session_ttl_ms=self.session_ttl_ms, ordinals=[1], replicas=self._replicas
                    )
                )
            elif kind == "join_group":
                joined = pb.GroupJoined(prefix=request.join_group.prefix, positions=[pb.Position(sequence=1)])
                yield pb.ConnectResponse(group_joined=joined)
            elif kind == "arrive":
                arrive = request.arrive
                decision = common_pb2.Decision(
                    prefix=arrive.prefix, sequence=arrive.sequence, outcome=common_pb2.OUTCOME_RELEASED
                )
                yield pb.ConnectResponse(decision=decision)
            elif kind == "goodbye":
                return

    def _more(self) -> dict[str, dict[str, Any]]:
        def check(request: Any, context: Any) -> store_pb2.CheckResponse:
            self._look(context)
            return store_pb2.CheckResponse(present=True)

        def join(request: Any, context: Any) -> Iterator[rendezvous_pb2.JoinResponse]:
            self._look(context)
            ended = threading.Event()
            context.add_callback(ended.set)
            complete = rendezvous_pb2.RoundComplete(round=0, rank=0, world_size=1)
            yield rendezvous_pb2.JoinResponse(round_complete=complete)
            ended.wait(PATIENCE)

        def leave(request: Any, context: Any) -> rendezvous_pb2.LeaveResponse:
            self._look(context)
            return rendezvous_pb2.LeaveResponse()

        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        return {
            "muster.v1.StoreService": {"Check": unary(check, response_serializer=written)},
            "muster.v1.RendezvousService": {
                "Join": stream(join, response_serializer=written),
                "Leave": unary(leave, response_serializer=written),
            },
        }


@pytest.fixture(autouse=True)
def _with_a_token(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MUSTER_TOKEN", TOKEN)
    yield
    sessions.close()


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def started(address: str = "127.0.0.1:0", replicas: tuple[str, ...] = ()) -> Peer:
        peers.append(Peer(address, replicas))
        return peers[-1]

    yield started
    for one in peers:
        one.stop()


@pytest.fixture
def relay(peer: Callable[..., Peer], tmp_path: Path) -> Peer:
    return peer(f"unix://{tmp_path / 'r'}")


@pytest.fixture
def direct(peer: Callable[..., Peer]) -> Peer:
    return peer()


@contextmanager
def session(endpoint: str) -> Iterator[Session]:
    one = Session(SessionConfig(endpoint=endpoint, run_id="job", generation=0, rank=0, host="node-0"))
    try:
        yield one
    finally:
        one.close()


def nobody(path: Path, *, is_there: bool) -> str:
    """A socket on which nobody listens."""
    if is_there:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    return f"unix://{path}"


def seconds(happen: Callable[[], object]) -> float:
    began = time.monotonic()
    happen()
    return time.monotonic() - began


def test_session_calls_the_relay_first_without_a_token(
    relay: Peer, direct: Peer, monkeypatch: pytest.MonkeyPatch
):
    with session(f"{direct.address},{relay.address}") as one:
        monkeypatch.setenv("MUSTER_TLS_CA", "/nowhere")
        one.join("p", Shape(1), PATIENCE)
        assert one.barrier("p", PATIENCE).outcome is Outcome.RELEASED
    assert (relay.shown, direct.shown) == ([None], [])


def test_relay_alone_needs_no_usable_credentials(relay: Peer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUSTER_TLS_CA", "/nowhere")
    monkeypatch.setenv("MUSTER_TLS_CERT", "without a key")
    monkeypatch.setenv("MUSTER_TOKEN_FILE", "/nowhere")
    with session(relay.address) as one:
        one.join("p", Shape(1), PATIENCE)
    assert relay.shown == [None]


def test_stream_is_replaced_if_the_relay_asks_for_a_faster_keepalive(relay: Peer, direct: Peer):
    relay.session_ttl_ms = 3_000
    with session(f"{relay.address},{direct.address}") as one:
        one.join("p", Shape(1), PATIENCE)
        assert one.barrier("p", PATIENCE).outcome is Outcome.RELEASED
    assert (relay.shown, direct.shown) == ([None, None], [])


@pytest.mark.parametrize("is_there", [False, True])
def test_dead_socket_costs_no_time(direct: Peer, tmp_path: Path, is_there: bool):
    dead = nobody(tmp_path / "dead", is_there=is_there)
    with session(f"{dead},{direct.address}") as one:
        assert seconds(lambda: one.join("p", Shape(1), PATIENCE)) < SOON
    assert direct.shown == [f"Bearer {TOKEN}"], "what holds for the others of the list"


def test_silent_socket_delays_a_session_only_briefly(direct: Peer, tmp_path: Path):
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute"))
        mute.listen()
        with session(f"unix://{tmp_path / 'mute'},{direct.address}") as one:
            assert seconds(lambda: one.join("p", Shape(1), PATIENCE)) < SOON


def test_relay_that_ends_is_left_at_once_and_called_again_later(relay: Peer, direct: Peer):
    endpoint = f"{relay.address},{direct.address}"
    with session(endpoint) as one:
        one.join("p", Shape(1), PATIENCE)
        relay.stop()
        assert seconds(lambda: until(lambda: direct.shown)) < SOON
        assert one.barrier("p", PATIENCE).outcome is Outcome.RELEASED
    assert replicas_of(endpoint).known() == [direct.address, relay.address]


def test_session_leaves_its_only_relay_for_addresses_it_named(
    peer: Callable[..., Peer], direct: Peer, tmp_path: Path
):
    relay = peer(f"unix://{tmp_path / 'r'}", (direct.address, "unix:///elsewhere"))
    with session(relay.address) as one:
        one.join("p", Shape(1), PATIENCE)
        relay.stop()
        until(lambda: direct.shown)
        assert one.barrier("p", PATIENCE).outcome is Outcome.RELEASED
    assert "unix:///elsewhere" not in replicas_of(relay.address).known()


def test_relay_that_cannot_reach_the_coordinator_is_skipped(relay: Peer, direct: Peer, tmp_path: Path):
    relay.refuses = rich_status("RELAY_CUT_OFF", "the coordinator is out of the relay's reach.")
    with session(f"{relay.address},{direct.address}") as one:
        assert seconds(lambda: one.join("p", Shape(1), PATIENCE)) < SOON
    assert (relay.shown, direct.shown) == ([None], [f"Bearer {TOKEN}"])


def test_refused_token_does_not_end_a_session_that_a_relay_welcomed(
    relay: Peer, direct: Peer, peer: Callable[..., Peer]
):
    direct.refuses = rich_status("TOKEN_UNKNOWN", "what token?", grpc.StatusCode.UNAUTHENTICATED)
    with session(f"{relay.address},{direct.address}") as one:
        one.join("p", Shape(1), PATIENCE)
        relay.stop()
        until(lambda: direct.shown)
        again = peer(relay.address)
        until(lambda: again.shown)
        assert one.barrier("p", PATIENCE).outcome is Outcome.RELEASED


def test_unreachable_socket_is_named_as_it_was_given(tmp_path: Path):
    path = tmp_path / "nobody"
    with session(f"unix://{path}") as one, pytest.raises(MusterError) as caught:
        one.join("p", Shape(1), 1.0)
    assert f"the coordinator at unix://{path} did not answer" in str(caught.value)
    assert "No such file or directory" in str(caught.value)


def test_socket_path_may_contain_uri_characters(peer: Callable[..., Peer], tmp_path: Path):
    relay = peer(f"unix:{tmp_path}/a%20b:1%23%C3%A9")
    with session(f"unix://{tmp_path}/a b:1#é") as one:
        one.join("p", Shape(1), PATIENCE)
    assert relay.shown == [None]


# ---------------------------------------------------------------------- store, rendezvous, barriers


def test_store_calls_the_relay_first_and_then_directly(relay: Peer, direct: Peer):
    store = CoordinatorStore(f"{relay.address},{direct.address}", "job")
    assert store.check(["k"])
    assert (relay.shown, direct.shown) == ([None], [])
    relay.refuses = rich_status("RELAY_CUT_OFF", "the coordinator is out of the relay's reach.")
    assert store.check(["k"])
    relay.stop()
    assert seconds(lambda: store.check(["k"])) < SOON
    assert (relay.shown, direct.shown) == ([None] * 2, [f"Bearer {TOKEN}"] * 2)
    store.close()


def node_of(endpoint: str) -> NodeConfig:
    return NodeConfig(
        endpoint=endpoint,
        run_id="job",
        address="node-0",
        min_nodes=1,
        max_nodes=1,
        join_timeout=PATIENCE,
        last_call_timeout=1.0,
        keep_alive_timeout=15.0,
        connect_timeout=PATIENCE,
        call_timeout=PATIENCE,
    )


def test_node_keeps_its_place_through_the_relay_and_without_it(relay: Peer, direct: Peer):
    node = NodeMembership(node_of(f"{relay.address},{direct.address}"))
    try:
        assert node.join() == Place(0, 0, 1)
        assert (relay.shown, direct.shown) == ([None], [])
        relay.stop()
        until(lambda: direct.shown)
    finally:
        node.leave("the test is over")
    assert direct.shown == [f"Bearer {TOKEN}"] * 2, "its place, and that it leaves"


def test_agent_returns_to_its_relay_after_a_coordinator_restart(peer: Callable[..., Peer], direct: Peer):
    relay = NodeRelay(direct.address)
    node, store = NodeMembership(node_of(relay.endpoint)), CoordinatorStore(relay.endpoint, "job")
    try:
        assert node.join() == Place(0, 0, 1)
        assert store.check(["k"])
        assert direct.relayed == [True, True]
        direct.stop()
        again = peer(direct.address)
        until(lambda: again.relayed)
        assert store.check(["k"])
        assert again.relayed == [True, True]
    finally:
        node.leave("the test is over")
        store.close()
        relay.stop()


def test_barriers_and_process_groups_use_the_environments_endpoint(
    relay: Peer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MUSTER_ENDPOINT", f"{relay.address},127.0.0.1:1")
    GrpcBarrier(0, 1, "p", timeout_secs=PATIENCE).execute_barrier()
    ((_, rank, world_size),) = init_method.meet("muster:///job?rank=0&world_size=1")
    assert (rank, world_size) == (0, 1)


def test_log_names_the_socket_of_a_session(relay: Peer, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO), session(relay.address) as one:
        one.join("p", Shape(1), PATIENCE)
    assert f"connected to {relay.address} as rank 0" in caplog.text
