"""Malformed, oversized, out-of-order and hostile input: a clear error each, and nobody is disturbed."""

import http.client
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import ErrorInfo

import muster.worker
from lab.patience import PATIENCE
from lab.processes.coordinator import Coordinator
from lab.processes.relay import RelayedCoordinator
from muster.v1 import (
    barrier_pb2,
    barrier_pb2_grpc,
    common_pb2,
    run_pb2,
    run_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)
from muster.worker import GrpcBarrier, RefusedError
from tests.support.rich_status import reason_of

RUN = "bad"
"""Stands for the run of a test's own."""
_numbers = itertools.count()


class Stream:
    """One raw session in a run of its own, for saying what the SDK never would."""

    def __init__(self, endpoint: str) -> None:
        self.run_id = f"{RUN}-{next(_numbers)}"
        self.channel = grpc.insecure_channel(endpoint, options=[("grpc.use_local_subchannel_pool", 1)])
        self._said: list[bytes] = []
        self._more = threading.Semaphore(0)
        connect: grpc.StreamStreamMultiCallable[bytes, session_pb2.ConnectResponse]
        connect = self.channel.stream_stream(
            "/muster.v1.SessionService/Connect",
            response_deserializer=session_pb2.ConnectResponse.FromString,
        )
        self._call = connect(self._requests())

    def _requests(self) -> Iterator[bytes]:
        while True:
            self._more.acquire()
            if not self._said:
                return
            yield self._said.pop(0)

    def say(self, message: session_pb2.ConnectRequest | bytes) -> "Stream":
        if isinstance(message, session_pb2.ConnectRequest) and message.hello.run_id == RUN:
            message.hello.run_id = self.run_id
        self._said.append(message if isinstance(message, bytes) else message.SerializeToString())
        self._more.release()
        return self

    def hear(self) -> session_pb2.ConnectResponse:
        return next(self._call)

    def decision(self) -> common_pb2.Decision:
        """The next decision; of a barrier that takes longer, its progress comes first."""
        while not (heard := self.hear()).HasField("decision"):
            assert heard.HasField("progress"), heard
        return heard.decision

    def refusal(self) -> tuple[str, str]:
        """Reason and message of the refusal that comes next."""
        refusal = self.hear().refusal
        info = ErrorInfo()
        assert refusal.error_info.Unpack(info)
        assert info.domain == "muster"
        return info.reason, refusal.message

    def end(self) -> tuple[grpc.StatusCode, str]:
        """The status with which the coordinator ends the stream, and the reason in it."""
        with pytest.raises(grpc.RpcError) as caught:
            while True:
                self.hear()
        return caught.value.code(), reason_of(caught.value)

    def close(self) -> None:
        self._more.release()
        self._call.cancel()
        self.channel.close()


@pytest.fixture(scope="module", params=[Coordinator, RelayedCoordinator])
def coordinator(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Coordinator]:
    """One for all: what one test says must not disturb the next."""
    with request.param(tmp_path_factory.mktemp("coordinator"), session_ttl=3.0) as running:
        yield running
        muster.worker.close()


@pytest.fixture
def stream(coordinator: Coordinator) -> Iterator[Stream]:
    opened = Stream(coordinator.endpoint)
    yield opened
    opened.close()


@pytest.fixture
def channel(coordinator: Coordinator) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(coordinator.endpoint) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _nobody_else_is_disturbed(coordinator: Coordinator) -> Iterator[None]:
    """A good rank meets before and after whatever the test does, and the log has no traceback."""
    good = GrpcBarrier(0, 1, "good", coordinator.endpoint, 20, 20, run_id="good")
    good.execute_barrier()
    yield
    good.execute_barrier()
    text = coordinator.log_path.read_text()
    assert "Traceback" not in text
    assert '"level": "error"' not in text


def hello(rank: int = 0, run_id: str = RUN, **more) -> session_pb2.ConnectRequest:
    process = session_pb2.Process(rank=rank, incarnation="i", host="h", pid=1)
    fields: dict[str, Any] = {"run_id": run_id, "processes": [process], "protocol_version": 1} | more
    return session_pb2.ConnectRequest(hello=session_pb2.Hello(**fields))


def join(prefix: str = "p", world_size: int = 2, **more) -> session_pb2.ConnectRequest:
    request = session_pb2.JoinGroup(prefix=prefix, world_size=world_size, **more)
    return session_pb2.ConnectRequest(join_group=request)


def arrive(sequence: int = 0, prefix: str = "p", timeout_ms: int = 1000, **more):
    arrival = session_pb2.Arrival(**({"rank": 0} | more))
    request = session_pb2.Arrive(prefix=prefix, sequence=sequence, timeout_ms=timeout_ms, arrivals=[arrival])
    return session_pb2.ConnectRequest(arrive=request)


@pytest.mark.parametrize(
    ("request_", "reason", "words"),
    [
        (arrive(), "HELLO_REQUIRED", "first message"),
        (join(), "HELLO_REQUIRED", "first message"),
        (hello(rank=-1), "INVALID_ARGUMENT", "rank = -1"),
        (hello(rank=2_000_000_000), "INVALID_ARGUMENT", "rank = 2000000000"),
        (hello(run_id=""), "INVALID_ARGUMENT", "must not be empty"),
        (hello(run_id="r" * 10_000), "INVALID_ARGUMENT", "10,000 bytes"),
        (hello(run_id="\x1b[31mred"), "INVALID_ARGUMENT", "control characters"),
        (hello(processes=[]), "INVALID_ARGUMENT", "at least one process"),
    ],
)
def test_a_bad_first_message_is_refused(stream: Stream, request_, reason: str, words: str):
    found, message = stream.say(request_).refusal()
    assert found == reason
    assert words in message
    assert "\x1b" not in message


@pytest.mark.parametrize(
    ("request_", "reason", "words"),
    [
        (join(prefix=""), "INVALID_ARGUMENT", "prefix"),
        (join(prefix="p" * 10_240), "INVALID_ARGUMENT", "10,240 bytes"),
        (join(world_size=0), "INVALID_ARGUMENT", "world_size = 0"),
        (join(world_size=-5), "INVALID_ARGUMENT", "world_size = -5"),
        (join(world_size=2**31 - 1), "INVALID_ARGUMENT", "world_size"),
        (join(participants=[0, 7]), "INVALID_ARGUMENT", "[7]"),
        (join(participants=[1]), "NOT_A_PARTICIPANT", "rank 0"),
        (join(ranks=[5]), "RANK_NOT_IN_SESSION", "rank 5"),
        (arrive(prefix="nowhere"), "NOT_JOINED", "JoinGroup"),
        (hello(), "HELLO_REPEATED", "already"),
    ],
)
def test_a_bad_join_is_refused(stream: Stream, request_, reason: str, words: str):
    stream.say(hello()).hear()
    found, message = stream.say(request_).refusal()
    assert found == reason
    assert words in message


def test_a_rank_beyond_its_world_is_refused(stream: Stream):
    stream.say(hello(rank=9)).hear()
    assert stream.say(join(world_size=4)).refusal()[0] == "NOT_A_PARTICIPANT"


@pytest.mark.parametrize(
    ("request_", "reason", "words"),
    [
        (arrive(rank=1), "RANK_NOT_IN_SESSION", "rank 1"),
        (arrive(rank=-1), "RANK_NOT_IN_SESSION", "rank -1"),
        (arrive(sequence=7), "SEQUENCE_AHEAD", "#7"),
        (arrive(timeout_ms=0), "INVALID_ARGUMENT", "timeout"),
        (arrive(timeout_ms=2**63), "INVALID_ARGUMENT", "timeout"),
        (arrive(payload=b"x" * 2_000_000), "LIMIT_EXCEEDED", "max_payload_bytes"),
        (arrive(write=common_pb2.WriteReport(step=2**63)), "INVALID_ARGUMENT", "write.step"),
        (arrive(write=common_pb2.WriteReport(bytes=2**64 - 1)), "INVALID_ARGUMENT", "write.bytes"),
        (arrive(write=common_pb2.WriteReport(write_ms=2**64 - 1)), "INVALID_ARGUMENT", "write.write_ms"),
    ],
)
def test_a_bad_arrival_is_refused(stream: Stream, request_, reason: str, words: str):
    stream.say(hello()).hear()
    stream.say(join()).hear()
    found, message = stream.say(request_).refusal()
    assert found == reason
    assert words in message
    # The session goes on: the next, good arrival is taken.
    stream.say(arrive(timeout_ms=100))
    assert stream.decision().outcome == common_pb2.OUTCOME_TIMED_OUT


def test_a_sequence_from_before_it_joined_is_refused(coordinator: Coordinator, stream: Stream):
    barrier = GrpcBarrier(0, 1, "p", coordinator.endpoint, 20, 20, run_id=stream.run_id)
    barrier.execute_barrier()
    stream.say(hello()).hear()
    assert stream.say(join(world_size=1)).hear().group_joined.positions[0].sequence == 1
    assert stream.say(arrive(sequence=0)).refusal()[0] == "SEQUENCE_BEHIND"


def test_another_protocol_version_is_refused(stream: Stream):
    stream.say(hello(protocol_version=99))
    assert stream.end() == (grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL_VERSION")


def test_garbage_on_a_stream_ends_that_stream(stream: Stream):
    stream.say(b"\xff\xfe not a message")
    assert stream.end() == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")


def test_a_message_of_30_mb_ends_that_stream(stream: Stream):
    stream.say(hello()).hear()
    stream.say(arrive(payload=b"x" * 30_000_000))
    with pytest.raises(grpc.RpcError) as caught:
        while True:  # A relay says why before that.
            stream.hear()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_the_sdk_refuses_a_large_payload_before_it_is_sent(coordinator: Coordinator):
    barrier = GrpcBarrier(0, 1, "big", coordinator.endpoint, 20, 20, run_id="bad")
    with pytest.raises(RefusedError, match=r"5,000,000 bytes.*1,048,576"):
        barrier.gather(b"x" * 5_000_000)
    assert barrier.gather(b"small") == [b"small"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"global_rank": -1},
        {"global_rank": 2},
        {"global_world_size": 0},
        {"timeout_secs": 0},
        {"timeout_secs": float("nan")},
        {"timeout_barrier_init_secs": -3},
        {"endpoint": "no port"},
        {"endpoint": ""},
        {"participants": [0, 9]},
        {"generation": -1},
        {"generation": 2**31},
        {"global_world_size": 2**31},
        {"barrier_prefix": ""},
        {"barrier_prefix": "x\udcff"},
        {"run_id": "x\udcff"},
        {"host": "x\udcff"},
    ],
)
def test_the_sdk_names_the_argument_that_is_not_usable(coordinator: Coordinator, arguments):
    good = {
        "global_rank": 0,
        "global_world_size": 2,
        "barrier_prefix": "p",
        "endpoint": coordinator.endpoint,
    }
    with pytest.raises(
        ValueError,
        match=r"rank|world|timeout|endpoint|coordinator|participants|generation|prefix|run_id|host",
    ):
        GrpcBarrier(**(good | arguments))


def test_garbage_bytes_and_other_protocols_on_the_port(coordinator: Coordinator):
    for garbage in (b"\x00" * 1000, os.urandom(5000), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", coordinator.port), timeout=PATIENCE) as raw:
            raw.sendall(garbage)
            raw.settimeout(PATIENCE)
            try:
                while raw.recv(4096):
                    pass
            except OSError:
                pass


def test_http_port_on_loopback_is_not_read_by_pages_of_other_sites(coordinator: Coordinator):
    """A page of another site may resolve its name to this port's address (DNS rebinding)."""
    asked: list[tuple[dict[str, str], int]] = [
        ({}, 200),
        ({"Host": f"evil.example:{coordinator.http_port}"}, 421),
        ({"Origin": "http://evil.example"}, 403),
    ]
    client = http.client.HTTPConnection("127.0.0.1", coordinator.http_port, timeout=PATIENCE)
    with closing(client):
        for path in ("/", "/status.json", "/metrics"):
            for headers, status in asked:
                client.request("GET", path, headers=headers)
                answer = client.getresponse()
                answer.read()
                assert (path, headers, answer.status) == (path, headers, status)


def test_the_http_port_answers_nonsense_with_404_or_400(coordinator: Coordinator):
    assert coordinator.get("/nothing/here")[0] == 404
    client = http.client.HTTPConnection("127.0.0.1", coordinator.http_port, timeout=PATIENCE)
    client.putrequest("GET", "/metrics")
    client.putheader("X-Long", "x" * 100_000)
    client.endheaders()
    assert client.getresponse().status == 400
    client.close()


def test_an_unknown_run_or_group_is_named(channel: grpc.Channel):
    runs, barriers = run_pb2_grpc.RunServiceStub(channel), barrier_pb2_grpc.BarrierServiceStub(channel)
    calls: list[tuple[Callable[[Any], Message], Message, str]] = [
        (runs.Get, run_pb2.RunServiceGetRequest(run_id="nope"), "RUN_NOT_FOUND"),
        (runs.Members, run_pb2.MembersRequest(run_id="nope"), "RUN_NOT_FOUND"),
        (
            barriers.Get,
            barrier_pb2.BarrierServiceGetRequest(run_id="good", prefix="nope"),
            "BARRIER_NOT_FOUND",
        ),
        (
            barriers.Get,
            barrier_pb2.BarrierServiceGetRequest(run_id="good", prefix="good", sequence=9_999),
            "BARRIER_NOT_FOUND",
        ),
        (barriers.Abort, barrier_pb2.AbortRequest(run_id="good", prefix="good"), "NO_OPEN_BARRIER"),
    ]
    for call, request, reason in calls:
        with pytest.raises(grpc.RpcError) as caught:
            call(request)
        assert reason_of(caught.value) == reason


def test_a_unary_arrival_is_decided_and_may_be_repeated(channel: grpc.Channel):
    barriers = barrier_pb2_grpc.BarrierServiceStub(channel)
    request = barrier_pb2.ArriveRequest(
        run_id="unary", prefix="p", rank=0, world_size=1, sequence=0, timeout_ms=1000, incarnation="me"
    )
    first, again = barriers.Arrive(request), barriers.Arrive(request)
    assert first == again
    assert first.decision.outcome == 1
    request.ClearField("sequence")
    assert barriers.Arrive(request).decision.sequence == 1
    long = barrier_pb2.ArriveRequest(run_id="unary", prefix="p" * 256, rank=0, world_size=1, timeout_ms=1000)
    assert barriers.Arrive(long).decision.outcome == 1
    request.world_size = 0
    with pytest.raises(grpc.RpcError) as caught:
        barriers.Arrive(request)
    assert reason_of(caught.value) == "INVALID_ARGUMENT"


def test_the_session_stub_works_for_others(coordinator: Coordinator, channel: grpc.Channel):
    """The committed stub, as a client in another program would use it."""
    answers = session_pb2_grpc.SessionServiceStub(channel).Connect(iter([hello(run_id="stub")]))
    assert next(answers).welcome.session_ttl_ms == 3000
    answers.cancel()
