"""A node's place, on a wire that the test holds in its hands."""

import gc
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace

import grpc
import pytest
from google.protobuf.any_pb2 import Any
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from lab.patience import PATIENCE, until
from muster.client import replicas
from muster.v1 import common_pb2, rendezvous_pb2_grpc
from muster.v1 import rendezvous_pb2 as pb
from muster.worker.environment import EnvironmentValueError
from muster.worker.errors import ConnectError, MusterError, RefusedError
from muster.worker.node import attendance as module
from muster.worker.node.attendance import Attendance, NodeConfig, Place
from muster.worker.transport import first_answer, fork_guard
from tests.support.meeting import in_thread

CONFIG = NodeConfig(
    endpoint="there:1",
    run_id="job",
    address="node-0",
    min_nodes=2,
    max_nodes=4,
    join_timeout=20,
    last_call_timeout=0.5,
    keep_alive_timeout=3,
    connect_timeout=20,
    call_timeout=1,
)


class Failed(grpc.RpcError):
    """A call's end, with the coordinator's reason or without."""

    def __init__(self, code: grpc.StatusCode, details: str, reason: str = "") -> None:
        self._code, self._details, self._reason = code, details, reason

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:  # type: ignore[override]
        if not self._reason:
            return ()
        info = Any()
        info.Pack(ErrorInfo(reason=self._reason, domain="muster"))
        status = Status(code=self._code.value[0], message=self._details, details=[info])
        return (("grpc-status-details-bin", status.SerializeToString()),)


def refusal(reason: str) -> Failed:
    return Failed(grpc.StatusCode.FAILED_PRECONDITION, f"refused: {reason}", reason)


BROKEN = Failed(grpc.StatusCode.UNAVAILABLE, "connection reset")


class Stream:
    """One call of Join."""

    def __init__(self, request: pb.JoinRequest) -> None:
        self.request = request
        self.cancelled = threading.Event()
        self._pushes: queue.SimpleQueue[pb.JoinResponse | grpc.RpcError] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[pb.JoinResponse]:
        while True:
            push = self._pushes.get()
            if isinstance(push, grpc.RpcError):
                raise push
            yield push

    def push(self, **message: object) -> "Stream":
        self._pushes.put(pb.JoinResponse(**message))  # type: ignore[arg-type]
        return self

    def complete(self, round: int = 0, rank: int = 0, world_size: int = 2) -> "Stream":
        return self.push(round_complete=pb.RoundComplete(round=round, rank=rank, world_size=world_size))

    def wait(self) -> "Stream":
        return self.push(standing=pb.Standing(standing=pb.NODE_STANDING_PARTICIPANT, message="waits"))

    def fail(self, error: grpc.RpcError) -> None:
        self._pushes.put(error)

    def cancel(self) -> None:
        self.cancelled.set()
        self._pushes.put(Failed(grpc.StatusCode.CANCELLED, "cancelled"))


class Wire:
    """The coordinator, as the node sees it."""

    def __init__(self) -> None:
        self._streams: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self.left: list[pb.LeaveRequest] = []
        self.answer: Exception | pb.RendezvousServiceGetResponse | pb.CloseResponse | None = None

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None: ...

    def stream(self) -> Stream:
        """The next one that the node opens."""
        return self._streams.get(timeout=PATIENCE)

    def quiet(self) -> bool:
        return self._streams.empty()

    # What the node calls.
    def Join(self, request: pb.JoinRequest, metadata: object) -> Stream:  # noqa: N802
        stream = Stream(request)
        self._streams.put(stream)
        return stream

    def Leave(self, request: pb.LeaveRequest, **_: object) -> None:  # noqa: N802
        self.left.append(request)
        self._answered()

    def Get(self, request: object, **_: object) -> object:  # noqa: N802
        return self._answered()

    def Close(self, request: object, **_: object) -> object:  # noqa: N802
        return self._answered()

    def _answered(self) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()
    monkeypatch.setattr(Attendance, "_channel", lambda *_: wire)
    monkeypatch.setattr(rendezvous_pb2_grpc, "RendezvousServiceStub", lambda channel: channel)
    monkeypatch.setattr(replicas, "FIRST_BACKOFF", 0.001)
    return wire


@pytest.fixture
def node(wire: Wire) -> Iterator[Attendance]:
    node = Attendance(CONFIG)
    yield node
    wire.answer = None
    node.leave("the test is over")


def joining(node: Attendance) -> Future[object]:
    return in_thread(node.join)


def in_round(node: Attendance, wire: Wire) -> Stream:
    place = joining(node)
    stream = wire.stream().complete()
    assert place.result(PATIENCE) == Place(0, 0, 2)
    return stream


# ---------------------------------------------------------------------- joining


def test_it_says_who_joins_and_on_what_terms(node: Attendance, wire: Wire):
    place = joining(node)
    stream = wire.stream().wait()
    request = stream.request
    assert (request.run_id, request.attempt, request.HasField("round")) == ("job", 1, False)
    assert (request.node.address, request.node.pid) == ("node-0", os.getpid())
    assert (request.min_nodes, request.max_nodes) == (2, 4)
    assert request.join_timeout_ms == 20_000
    assert request.last_call_timeout_ms == 500
    assert request.keep_alive_timeout_ms == 3_000
    assert request.protocol_version == 1
    stream.complete(5, 1, 3)
    assert place.result(PATIENCE) == Place(5, 1, 3)


def test_a_wait_goes_on_over_another_stream(node: Attendance, wire: Wire):
    place = joining(node)
    first = wire.stream().wait()
    first.fail(BROKEN)
    second = wire.stream()
    second.request.waited_ms = 0
    assert second.request == first.request
    second.complete()
    assert place.result(PATIENCE) == Place(0, 0, 2)


class Clock:
    """The node's clock, which the test moves."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_it_says_for_how_long_it_has_waited_for_a_round(node: Attendance, wire: Wire, clock: Clock):
    place = joining(node)
    first = wire.stream()
    clock.now += 5.0
    first.fail(BROKEN)
    second = wire.stream()
    assert second.request.waited_ms == 0, "no coordinator has taken it in yet"
    second.wait()
    until(lambda: node._waits_since is not None, "it does not hear that it is taken in")
    clock.now += 7.5
    second.fail(BROKEN)
    third = wire.stream().wait()
    assert third.request.waited_ms == 7_500
    clock.now += 1.0
    third.fail(BROKEN)
    fourth = wire.stream()
    assert fourth.request.waited_ms == 8_500
    fourth.complete()
    assert place.result(PATIENCE)
    clock.now += 1_000.0
    fourth.fail(BROKEN)
    assert wire.stream().request.waited_ms == 0, "it holds its place"
    joining(node)
    assert wire.stream().request.waited_ms == 0, "another attempt"


def test_who_stands_by_waits_from_when_it_is_let_in(node: Attendance, wire: Wire, clock: Clock):
    joining(node)
    first = wire.stream().wait()
    first.push(standing=pb.Standing(standing=pb.NODE_STANDING_REDUNDANT, message="stands by"))
    until(lambda: node._stands_by, "it does not hear that it stands by")
    clock.now += 500.0
    first.fail(BROKEN)
    second = wire.stream()
    assert second.request.waited_ms == 0
    second.push(standing=pb.Standing(standing=pb.NODE_STANDING_WAITING, message="waits"))
    until(lambda: node._waits_since is not None, "it does not hear that it is let in")
    clock.now += 3.0
    second.fail(BROKEN)
    assert wire.stream().request.waited_ms == 3_000


def test_a_place_is_held_over_another_stream_that_names_the_round(node: Attendance, wire: Wire):
    in_round(node, wire).fail(BROKEN)
    again = wire.stream()
    assert (again.request.attempt, again.request.round) == (1, 0)
    assert again.request.HasField("round")


def test_joining_again_ends_the_old_stream_and_raises_the_attempt(node: Attendance, wire: Wire):
    first = in_round(node, wire)
    place = joining(node)
    second = wire.stream()
    assert first.cancelled.wait(PATIENCE)
    assert (second.request.attempt, second.request.HasField("round")) == (2, False)
    assert second.request.node.incarnation == first.request.node.incarnation
    second.complete(1, 1, 2)
    assert place.result(PATIENCE) == Place(1, 1, 2)


@pytest.mark.parametrize(
    "reason",
    ["COORDINATOR_DRAINING", "RELAY_CUT_OFF", "UPSTREAM_LOST", "SESSION_REPLACED", "SLOW_CONSUMER"],
)
def test_a_refusal_that_passes_is_no_error(node: Attendance, wire: Wire, reason: str):
    place = joining(node)
    wire.stream().fail(refusal(reason))
    wire.stream().complete()
    assert place.result(PATIENCE) == Place(0, 0, 2)


@pytest.mark.parametrize(
    "reason", ["SETTINGS_DIFFER", "RUN_CLOSED", "LIMIT_EXCEEDED", "RENDEZVOUS_TIMED_OUT"]
)
def test_a_refusal_ends_the_wait_with_its_reason(node: Attendance, wire: Wire, reason: str):
    place = joining(node)
    wire.stream().fail(refusal(reason))
    error = place.exception(PATIENCE)
    assert isinstance(error, RefusedError)
    assert (error.reason, str(error)) == (reason, f"refused: {reason}")


def test_a_refusal_does_not_hold_those_whom_it_passed(node: Attendance, wire: Wire):
    class Caller:
        def join(self) -> None:
            with pytest.raises(RefusedError):
                node.join()

    caller = Caller()
    gone = weakref.ref(caller)
    place = in_thread(caller.join)
    del caller
    wire.stream().fail(refusal("RUN_CLOSED"))
    place.result(PATIENCE)
    until(lambda: gc.collect() >= 0 and gone() is None, "what was refused holds its caller")


def test_a_limit_that_is_met_when_coming_back_passes(node: Attendance, wire: Wire):
    place = joining(node)
    wire.stream().wait().fail(BROKEN)
    wire.stream().fail(refusal("LIMIT_EXCEEDED"))
    wire.stream().complete()
    assert place.result(PATIENCE) == Place(0, 0, 2)


def test_who_is_not_one_of_ours_is_told_apart_at_once(node: Attendance, wire: Wire):
    place = joining(node)
    wire.stream().fail(Failed(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))
    with pytest.raises(RefusedError, match=r"there:1 does not serve muster\.v1\.RendezvousService"):
        place.result(PATIENCE)


def test_without_a_coordinator_it_gives_up_and_says_where_and_why(wire: Wire):
    node = Attendance(NodeConfig(**{name: getattr(CONFIG, name) for name in CONFIG.__slots__} | SHORT))
    place = joining(node)
    wire.stream().fail(BROKEN)
    error = place.exception(PATIENCE)
    assert isinstance(error, ConnectError)
    assert (
        "there:1 could not be reached within the timeout of 0.5 s; last error: UNAVAILABLE: connection reset"
        in str(error)
    )
    node.leave("")
    assert wire.left == [], "who was never there need not leave"


SHORT = {"connect_timeout": 0.5}


class Impatient(threading.Timer):
    """Its time is over at once for the first stream, and never for a later one."""

    made = 0

    def __init__(self, _: float, then: Callable[[], None]) -> None:
        Impatient.made += 1
        super().__init__(0.0 if Impatient.made == 1 else threading.TIMEOUT_MAX, then)


def test_coordinator_that_accepts_a_stream_and_sends_nothing_is_left(
    node: Attendance, wire: Wire, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Impatient, "made", 0)
    monkeypatch.setattr(first_answer, "Timer", Impatient)
    place = joining(node)
    silent = wire.stream()
    assert silent.cancelled.wait(PATIENCE)
    second = wire.stream()
    assert "it accepted the stream and sent nothing for 30 s" in node._search.said
    second.complete()
    assert place.result(PATIENCE) == Place(0, 0, 2)


# ---------------------------------------------------------------------- among replicas


@pytest.fixture
def elsewhere(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attendance]:
    """A node that knows nobody yet."""
    monkeypatch.setattr(replicas, "_all", {})
    node = Attendance(replace(CONFIG, endpoint="elsewhere:1"))
    yield node
    wire.answer = None
    node.leave("the test is over")


def test_a_node_learns_of_the_replicas_and_pings_as_they_ask(elsewhere: Attendance, wire: Wire):
    place = joining(elsewhere)
    first = wire.stream()
    first.push(replicas=pb.Replicas(addresses=["a:1", "b:1"], keepalive_ms=900))
    assert first.cancelled.wait(PATIENCE), "its own keepalive is slower"
    assert not elsewhere._connected
    second = wire.stream().push(replicas=pb.Replicas(addresses=["a:1", "b:1"], keepalive_ms=900))
    assert second.request == first.request
    second.complete()
    assert place.result(PATIENCE) == Place(0, 0, 2)
    known = replicas.replicas_of("elsewhere:1")
    assert known.known() == ["elsewhere:1", "a:1", "b:1"]
    assert known.target("a:1").keepalive_ms == 900


def test_a_join_and_a_place_follow_the_leader(elsewhere: Attendance, wire: Wire):
    place = joining(elsewhere)
    wire.stream().fail(refusal("NOT_LEADER"))
    stream = wire.stream().complete()
    assert place.result(PATIENCE) == Place(0, 0, 2)
    stream.fail(refusal("NOT_LEADER"))
    assert wire.stream().request.round == 0


# ---------------------------------------------------------------------- in a round


def test_it_counts_who_waits_as_it_is_told(node: Attendance, wire: Wire):
    assert node.nodes_waiting == 0
    stream = in_round(node, wire)
    stream.push(nodes_waiting=pb.NodesWaiting(count=3))
    until(lambda: node.nodes_waiting == 3)
    stream.push(nodes_waiting=pb.NodesWaiting(count=0))
    until(lambda: node.nodes_waiting == 0)


def test_a_removed_node_sees_itself_waiting_and_comes_back_as_a_newcomer(node: Attendance, wire: Wire):
    first = in_round(node, wire)
    first.fail(refusal("NODE_REMOVED"))
    until(lambda: node.nodes_waiting == 1)
    place = joining(node)
    again = wire.stream()
    assert again.request.node.incarnation != first.request.node.incarnation
    assert not again.request.HasField("round")
    again.complete(3, 1, 2)
    assert place.result(PATIENCE) == Place(3, 1, 2)
    assert node.nodes_waiting == 0


@pytest.mark.parametrize(
    "reason", ["LIMIT_EXCEEDED", "PROTOCOL_VERSION", "COORDINATOR_DRAINING", "RELAY_CUT_OFF"]
)
def test_a_place_is_asked_for_again_until_somebody_says_that_it_is_lost(
    node: Attendance, wire: Wire, reason: str
):
    in_round(node, wire).fail(refusal(reason))
    wire.stream().fail(Failed(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))
    wire.stream().complete().push(nodes_waiting=pb.NodesWaiting(count=2))
    until(lambda: node.nodes_waiting == 2)


def test_what_comes_late_on_an_old_stream_changes_nothing(node: Attendance, wire: Wire):
    old = in_round(node, wire)
    place = joining(node)
    new = wire.stream()
    node._take(1, pb.JoinResponse(nodes_waiting=pb.NodesWaiting(count=9)))
    node._refused(1, RefusedError("late", "RUN_CLOSED"))
    new.complete(1, 0, 1)
    assert place.result(PATIENCE) == Place(1, 0, 1)
    assert (node.nodes_waiting, node.closed) == (0, False)
    assert old.cancelled.is_set()


# ---------------------------------------------------------------------- the closed state


def test_it_does_not_know_whether_the_run_is_closed_before_it_was_told(node: Attendance, wire: Wire):
    before = node.closed
    stream = in_round(node, wire)
    assert (before, node.closed) == (None, False)
    stream.fail(BROKEN)
    again = wire.stream()
    assert node.closed is False, "what was told last"
    again.complete().push(closed=common_pb2.Closed(by="ops"))
    until(lambda: node.closed is True)


@pytest.mark.parametrize("reason", ["RUN_CLOSED", "NODE_NOT_NEEDED"])
def test_a_refusal_may_say_that_the_run_is_closed(node: Attendance, wire: Wire, reason: str):
    place = joining(node)
    wire.stream().fail(refusal(reason))
    assert place.exception(PATIENCE) is not None
    assert node.closed is True


def test_who_holds_no_place_is_told_nothing(node: Attendance, wire: Wire):
    place = joining(node)
    wire.stream().fail(refusal("RENDEZVOUS_TIMED_OUT"))
    assert place.exception(PATIENCE) is not None
    assert node.closed is None


def test_who_was_removed_is_told_nothing(node: Attendance, wire: Wire):
    in_round(node, wire).fail(refusal("NODE_REMOVED"))
    until(lambda: node.nodes_waiting == 1)
    assert node.closed is None


def test_asking_tells_open_closed_and_unknown_runs(node: Attendance, wire: Wire):
    shown = pb.Rendezvous(run_id="job")
    wire.answer = pb.RendezvousServiceGetResponse(rendezvous=shown)
    assert node.ask_closed() is False
    shown.closed.by = "ops"
    wire.answer = pb.RendezvousServiceGetResponse(rendezvous=shown)
    assert node.ask_closed() is True
    wire.answer = refusal("RUN_NOT_FOUND")
    assert node.ask_closed() is False
    wire.answer = BROKEN
    with pytest.raises(ConnectError, match="there:1 did not answer: UNAVAILABLE: connection reset"):
        node.ask_closed()


def test_who_closes_knows_that_it_is_closed(node: Attendance, wire: Wire):
    wire.answer = pb.CloseResponse(closed=common_pb2.Closed(by="somebody before us"))
    node.close("over", 1)
    assert node.closed is True
    wire.answer = BROKEN
    with pytest.raises(ConnectError):
        node.close("over", 1)


# ---------------------------------------------------------------------- leaving


def test_who_leaves_says_so_once_and_its_stream_ends(node: Attendance, wire: Wire):
    stream = in_round(node, wire)
    node.leave("over")
    node.leave("over")
    assert [(left.run_id, left.reason) for left in wire.left] == [("job", "over")]
    assert wire.left[0].incarnation == stream.request.node.incarnation
    assert stream.cancelled.is_set()
    assert wire.quiet()


def test_leaving_ends_a_wait(node: Attendance, wire: Wire):
    place = joining(node)
    wire.stream().wait()
    until(lambda: node._connected)
    node.leave("over")
    with pytest.raises(MusterError, match="has left"):
        place.result(PATIENCE)


@pytest.mark.parametrize("why", [BROKEN, EnvironmentValueError("MUSTER_TOKEN_FILE = x: it cannot be read.")])
def test_leaving_without_a_coordinator_is_no_error(node: Attendance, wire: Wire, why: Exception):
    in_round(node, wire)
    wire.answer = why
    node.leave("over")


def test_a_token_file_that_is_away_is_a_failure_to_reach_the_coordinator(node: Attendance, wire: Wire):
    wire.answer = EnvironmentValueError("MUSTER_TOKEN_FILE = x: it cannot be read.")
    for call in (node.ask_closed, lambda: node.close("over", 1)):
        with pytest.raises(ConnectError, match="there:1 could not be asked: MUSTER_TOKEN_FILE = x"):
            call()


def test_who_is_abandoned_in_a_round_says_so_and_its_thread_ends(node: Attendance, wire: Wire):
    stream = in_round(node, wire)
    node.abandon()
    assert stream.cancelled.is_set()
    until(lambda: node._thread is not None and not node._thread.is_alive())
    assert [(left.incarnation, left.reason) for left in wire.left] == [
        (stream.request.node.incarnation, "nobody holds its handler any more")
    ]


def test_who_is_abandoned_between_two_streams_opens_no_other(
    node: Attendance, wire: Wire, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(replicas, "FIRST_BACKOFF", 0.5)
    stream = in_round(node, wire)
    stream.fail(BROKEN)
    until(lambda: not node._connected)
    node.abandon()
    until(lambda: len(wire.left) == 1)
    assert wire.quiet()


def test_who_is_abandoned_while_a_stream_opens_cancels_it(node: Attendance, wire: Wire):
    place = joining(node)
    opened = wire.Join

    def abandoned_meanwhile(request: pb.JoinRequest, metadata: object) -> Stream:
        node.abandon()
        return opened(request, metadata)

    first = wire.stream()
    wire.Join = abandoned_meanwhile  # type: ignore[method-assign]
    first.wait().fail(BROKEN)
    second = wire.stream()
    assert second.cancelled.wait(PATIENCE)
    until(lambda: node._thread is not None and not node._thread.is_alive())
    node.leave("over")
    assert isinstance(place.exception(PATIENCE), MusterError)


def test_a_forked_child_abandons_nothing_of_its_parents(node: Attendance, wire: Wire):
    stream = in_round(node, wire)
    node._owner = os.getpid() + 1
    node.abandon()
    assert not stream.cancelled.is_set()
    node._owner = os.getpid()


def test_who_has_left_gives_its_claim_back(node: Attendance, wire: Wire, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fork_guard, "_claims", [])
    in_round(node, wire)
    assert [claim.what for claim in fork_guard._claims] == ["a node's place"]
    node.leave("over")
    assert fork_guard._claims == []


def test_who_never_joined_has_nothing_to_leave(node: Attendance, wire: Wire):
    node.leave("over")
    assert wire.left == []


def test_a_forked_child_does_not_leave_for_its_parent(node: Attendance, wire: Wire):
    stream = in_round(node, wire)
    node._owner = os.getpid() + 1
    node.leave("the child ended")
    assert wire.left == []
    assert not stream.cancelled.is_set()
    node._owner = os.getpid()


# ---------------------------------------------------------------------- a run that is forgotten


def test_a_node_of_a_run_that_was_forgotten_does_not_begin_it_again(node: Attendance, wire: Wire):
    in_round(node, wire).fail(refusal("RUN_FORGOTTEN"))
    until(lambda: node.closed is True, "it does not hear that the run is over")
    assert node.nodes_waiting == 0
    for again in (node.join, lambda: node.close("the job is over", 1.0)):
        with pytest.raises(RefusedError, match="RUN_FORGOTTEN"):
            again()
    node.leave("the agent ends")
    assert wire.quiet()
    assert not wire.left
