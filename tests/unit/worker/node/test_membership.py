"""A node's place, on a wire that the test holds in its hands."""

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc
import pytest

from lab.patience import PATIENCE, until
from muster.client import replicas
from muster.v1 import common_pb2
from muster.v1 import rendezvous_pb2 as pb
from muster.worker.environment import EnvironmentValueError
from muster.worker.errors import ConnectError, MusterError, RefusedError
from muster.worker.node.membership import NodeConfig, NodeMembership, Place
from muster.worker.transport import first_answer, fork_guard
from tests.support.rendezvous_runs import in_thread
from tests.support.world.node_wire import BROKEN, Failed, Stream, Wire, refusal
from tests.unit.worker.node.joined_node import CONFIG, in_round, joining

# ---------------------------------------------------------------------- joining


def test_join_request_states_the_node_and_its_terms(node: NodeMembership, wire: Wire):
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


def test_wait_continues_on_another_stream(node: NodeMembership, wire: Wire):
    place = joining(node)
    first = wire.stream().wait()
    first.fail(BROKEN)
    second = wire.stream()
    second.request.waited_ms = 0
    assert second.request == first.request
    second.complete()
    assert place.result(PATIENCE) == Place(0, 0, 2)


def test_place_is_kept_by_a_stream_that_names_the_round(node: NodeMembership, wire: Wire):
    in_round(node, wire).fail(BROKEN)
    again = wire.stream()
    assert (again.request.attempt, again.request.round) == (1, 0)
    assert again.request.HasField("round")


def test_joining_again_ends_the_old_stream_and_raises_the_attempt(node: NodeMembership, wire: Wire):
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
def test_transient_refusal_is_no_error(node: NodeMembership, wire: Wire, reason: str):
    place = joining(node)
    wire.stream().fail(refusal(reason))
    wire.stream().complete()
    assert place.result(PATIENCE) == Place(0, 0, 2)


@pytest.mark.parametrize(
    "reason", ["SETTINGS_DIFFER", "RUN_CLOSED", "LIMIT_EXCEEDED", "RENDEZVOUS_TIMED_OUT"]
)
def test_refusal_ends_the_wait_with_its_reason(node: NodeMembership, wire: Wire, reason: str):
    place = joining(node)
    wire.stream().fail(refusal(reason))
    error = place.exception(PATIENCE)
    assert isinstance(error, RefusedError)
    assert (error.reason, str(error)) == (reason, f"refused: {reason}")


def test_refusal_keeps_no_caller_alive(node: NodeMembership, wire: Wire):
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


def test_limit_is_transient_for_a_returning_node(node: NodeMembership, wire: Wire):
    place = joining(node)
    wire.stream().wait().fail(BROKEN)
    wire.stream().fail(refusal("LIMIT_EXCEEDED"))
    wire.stream().complete()
    assert place.result(PATIENCE) == Place(0, 0, 2)


def test_another_program_at_the_address_is_refused_at_once(node: NodeMembership, wire: Wire):
    place = joining(node)
    wire.stream().fail(Failed(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))
    with pytest.raises(RefusedError, match=r"there:1 does not serve muster\.v1\.RendezvousService"):
        place.result(PATIENCE)


def test_join_fails_without_a_coordinator_and_names_address_and_cause(wire: Wire):
    node = NodeMembership(NodeConfig(**{name: getattr(CONFIG, name) for name in CONFIG.__slots__} | SHORT))
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
    node: NodeMembership, wire: Wire, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Impatient, "made", 0)
    monkeypatch.setattr(first_answer, "Timer", Impatient)
    place = joining(node)
    silent = wire.stream()
    assert silent.cancelled.wait(PATIENCE)
    second = wire.stream()
    assert "it accepted the stream and sent nothing for 30 s" in node._stream.search.said
    second.complete()
    assert place.result(PATIENCE) == Place(0, 0, 2)


# ---------------------------------------------------------------------- among replicas


@pytest.fixture
def elsewhere(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeMembership]:
    """A node that knows nobody yet."""
    monkeypatch.setattr(replicas, "_all", {})
    node = NodeMembership(replace(CONFIG, endpoint="elsewhere:1"))
    yield node
    wire.answer = None
    node.leave("the test is over")


def test_node_learns_the_replicas_and_their_keepalive(elsewhere: NodeMembership, wire: Wire):
    place = joining(elsewhere)
    first = wire.stream()
    first.push(replicas=pb.Replicas(addresses=["a:1", "b:1"], keepalive_ms=900))
    assert first.cancelled.wait(PATIENCE), "its own keepalive is slower"
    assert not elsewhere._stream.connected
    second = wire.stream().push(replicas=pb.Replicas(addresses=["a:1", "b:1"], keepalive_ms=900))
    assert second.request == first.request
    second.complete()
    assert place.result(PATIENCE) == Place(0, 0, 2)
    known = replicas.replicas_of("elsewhere:1")
    assert known.known() == ["elsewhere:1", "a:1", "b:1"]
    assert known.target("a:1").keepalive_ms == 900


def test_join_and_place_follow_the_leader(elsewhere: NodeMembership, wire: Wire):
    place = joining(elsewhere)
    wire.stream().fail(refusal("NOT_LEADER"))
    stream = wire.stream().complete()
    assert place.result(PATIENCE) == Place(0, 0, 2)
    stream.fail(refusal("NOT_LEADER"))
    assert wire.stream().request.round == 0


# ---------------------------------------------------------------------- in a round


def test_waiting_nodes_are_counted_by_the_coordinator(node: NodeMembership, wire: Wire):
    assert node.nodes_waiting == 0
    stream = in_round(node, wire)
    stream.push(nodes_waiting=pb.NodesWaiting(count=3))
    until(lambda: node.nodes_waiting == 3)
    stream.push(nodes_waiting=pb.NodesWaiting(count=0))
    until(lambda: node.nodes_waiting == 0)


def test_lost_nodes_count_until_the_run_is_closed(node: NodeMembership, wire: Wire):
    stream = in_round(node, wire)
    stream.push(nodes_waiting=pb.NodesWaiting(lost=2))
    until(lambda: node.nodes_lost == 2)
    assert node.nodes_waiting == 0
    stream.push(closed={"by": "node-0"})
    until(lambda: node.nodes_lost == 0)


def test_removed_node_waits_and_joins_again_as_a_newcomer(node: NodeMembership, wire: Wire):
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
def test_place_is_requested_again_until_it_is_lost(node: NodeMembership, wire: Wire, reason: str):
    in_round(node, wire).fail(refusal(reason))
    wire.stream().fail(Failed(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))
    wire.stream().complete().push(nodes_waiting=pb.NodesWaiting(count=2))
    until(lambda: node.nodes_waiting == 2)


def test_late_messages_of_a_replaced_stream_change_nothing(node: NodeMembership, wire: Wire):
    old = in_round(node, wire)

    def late() -> None:
        old.push(nodes_waiting=pb.NodesWaiting(count=9)).fail(refusal("RUN_CLOSED"))

    old.cancel = late  # type: ignore[method-assign]
    place = joining(node)
    wire.stream().complete(1, 0, 1)
    assert place.result(PATIENCE) == Place(1, 0, 1)
    assert (node.nodes_waiting, node.closed) == (0, False)


# ---------------------------------------------------------------------- the closed state


def test_closed_state_is_unknown_before_the_first_answer(node: NodeMembership, wire: Wire):
    before = node.closed
    stream = in_round(node, wire)
    assert (before, node.closed) == (None, False)
    stream.fail(BROKEN)
    again = wire.stream()
    assert node.closed is False, "what was told last"
    again.complete().push(closed=common_pb2.Closed(by="ops"))
    until(lambda: node.closed is True)


@pytest.mark.parametrize("reason", ["RUN_CLOSED", "NODE_NOT_NEEDED"])
def test_refusal_may_say_that_the_run_is_closed(node: NodeMembership, wire: Wire, reason: str):
    place = joining(node)
    wire.stream().fail(refusal(reason))
    assert place.exception(PATIENCE) is not None
    assert node.closed is True


def test_closed_state_is_unknown_after_a_timeout(node: NodeMembership, wire: Wire):
    place = joining(node)
    wire.stream().fail(refusal("RENDEZVOUS_TIMED_OUT"))
    assert place.exception(PATIENCE) is not None
    assert node.closed is None


def test_closed_state_is_unknown_to_a_removed_node(node: NodeMembership, wire: Wire):
    in_round(node, wire).fail(refusal("NODE_REMOVED"))
    until(lambda: node.nodes_waiting == 1)
    assert node.closed is None


def test_ask_closed_tells_open_closed_and_unknown_runs_apart(node: NodeMembership, wire: Wire):
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


def test_closing_node_knows_that_the_run_is_closed(node: NodeMembership, wire: Wire):
    wire.answer = pb.CloseResponse(closed=common_pb2.Closed(by="somebody before us"))
    node.close("over", 1)
    assert node.closed is True
    wire.answer = BROKEN
    with pytest.raises(ConnectError):
        node.close("over", 1)


# ---------------------------------------------------------------------- leaving


def test_leave_tells_the_coordinator_once_and_ends_the_stream(node: NodeMembership, wire: Wire):
    stream = in_round(node, wire)
    node.leave("over")
    node.leave("over")
    assert [(left.run_id, left.reason) for left in wire.left] == [("job", "over")]
    assert wire.left[0].incarnation == stream.request.node.incarnation
    assert stream.cancelled.is_set()
    assert wire.quiet()


def test_leave_ends_a_wait(node: NodeMembership, wire: Wire):
    place = joining(node)
    wire.stream().wait()
    until(lambda: node._stream.connected)
    node.leave("over")
    with pytest.raises(MusterError, match="has left"):
        place.result(PATIENCE)


@pytest.mark.parametrize("why", [BROKEN, EnvironmentValueError("MUSTER_TOKEN_FILE = x: it cannot be read.")])
def test_leave_without_a_coordinator_is_no_error(node: NodeMembership, wire: Wire, why: Exception):
    in_round(node, wire)
    wire.answer = why
    node.leave("over")


def test_missing_token_file_is_a_connect_error(node: NodeMembership, wire: Wire):
    wire.answer = EnvironmentValueError("MUSTER_TOKEN_FILE = x: it cannot be read.")
    for call in (node.ask_closed, lambda: node.close("over", 1)):
        with pytest.raises(ConnectError, match="there:1 could not be asked: MUSTER_TOKEN_FILE = x"):
            call()


def test_abandoned_node_tells_the_coordinator_and_its_thread_ends(node: NodeMembership, wire: Wire):
    stream = in_round(node, wire)
    node.abandon()
    assert stream.cancelled.is_set()
    until(lambda: node._stream.thread is not None and not node._stream.thread.is_alive())
    assert [(left.incarnation, left.reason) for left in wire.left] == [
        (stream.request.node.incarnation, "nobody holds its handler any more")
    ]


def test_node_abandoned_between_two_streams_opens_no_other(
    node: NodeMembership, wire: Wire, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(replicas, "FIRST_BACKOFF", 0.5)
    stream = in_round(node, wire)
    stream.fail(BROKEN)
    until(lambda: not node._stream.connected)
    node.abandon()
    until(lambda: len(wire.left) == 1)
    assert wire.quiet()


def test_node_abandoned_while_a_stream_opens_cancels_it(node: NodeMembership, wire: Wire):
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
    until(lambda: node._stream.thread is not None and not node._stream.thread.is_alive())
    node.leave("over")
    assert isinstance(place.exception(PATIENCE), MusterError)


def test_forked_child_abandons_nothing_of_its_parent(node: NodeMembership, wire: Wire):
    stream = in_round(node, wire)
    node._owner = os.getpid() + 1
    node.abandon()
    assert not stream.cancelled.is_set()
    node._owner = os.getpid()


def test_leave_ends_the_grpc_usage(node: NodeMembership, wire: Wire, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fork_guard, "_usages", [])
    in_round(node, wire)
    assert [claim.what for claim in fork_guard._usages] == ["a node's place"]
    node.leave("over")
    assert fork_guard._usages == []


def test_leave_before_a_join_tells_nobody(node: NodeMembership, wire: Wire):
    node.leave("over")
    assert wire.left == []


def test_forked_child_does_not_leave_for_its_parent(node: NodeMembership, wire: Wire):
    stream = in_round(node, wire)
    node._owner = os.getpid() + 1
    node.leave("the child ended")
    assert wire.left == []
    assert not stream.cancelled.is_set()
    node._owner = os.getpid()


# ---------------------------------------------------------------------- a run that is forgotten


def test_node_of_a_forgotten_run_does_not_start_it_again(node: NodeMembership, wire: Wire):
    in_round(node, wire).fail(refusal("RUN_FORGOTTEN"))
    until(lambda: node.closed is True, "it does not hear that the run is over")
    assert node.nodes_waiting == 0
    for again in (node.join, lambda: node.close("the job is over", 1.0)):
        with pytest.raises(RefusedError, match="RUN_FORGOTTEN"):
            again()
    node.leave("the agent ends")
    assert wire.quiet()
    assert not wire.left
