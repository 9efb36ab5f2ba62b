"""Unary calls to the leader, on a clock of the test's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import grpc
import pytest

from muster.client.replicas import Replicas, Search, Target
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.v1 import rendezvous_pb2 as pb
from muster.worker.transport import unary
from tests.unit.worker.test_store import Failure, refusal, relay_cut_off, upstream_lost

BROKEN = Failure(grpc.StatusCode.UNAVAILABLE, "connection refused")
STANDS_BY = refusal(Refusal(Reason.NOT_LEADER, "b leads.", leader="b:1", replicas="a:1,b:1"))
NOBODY = refusal(Refusal(Reason.NOT_LEADER, "nobody leads.", replicas=""))
REFUSED = refusal(Refusal(Reason.RUN_NOT_FOUND, "no such run."))


class Wire:
    """What each address answers, and a clock that pauses move."""

    def __init__(self, endpoint: str, **answers: list[Any]) -> None:
        self.now = 0.0
        self.answers = answers
        self.called: list[str] = []
        self.waited_for: list[bool] = []
        self.search = Search(Replicas(endpoint, self.monotonic, lambda address: [address]))

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    @contextmanager
    def channel(self, target: Target) -> Iterator[Any]:
        def call(request: Any, *, timeout: float, metadata: Any, wait_for_ready: bool) -> Any:
            self.called.append(target.address[0])
            self.waited_for.append(wait_for_ready)
            self.now += 0.01
            answers = self.answers[target.address[0]]
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            if isinstance(answer, Exception):
                raise answer
            return answer

        yield call

    def ask(self, timeout: float = 10.0, *, wait: bool = True) -> Any:
        return unary.ask_leader(
            self.search,
            self.channel,
            lambda call: cast(Any, call),
            pb.LeaveRequest(),
            timeout,
            wait=wait,
        )


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Any:
    def made(endpoint: str, **answers: list[Any]) -> Wire:
        wire = Wire(endpoint, **answers)
        monkeypatch.setattr(unary, "time", wire)
        return wire

    return made


@pytest.mark.parametrize("wait", [True, False])
def test_single_coordinator_is_called_once(wire: Any, wait: bool):
    one = wire("a:1", a=[BROKEN])
    with pytest.raises(grpc.RpcError):
        one.ask(wait=wait)
    assert (one.called, one.waited_for) == (["a"], [wait])


@pytest.mark.parametrize("first", [BROKEN, STANDS_BY, relay_cut_off()])
def test_next_of_several_coordinators_is_called_after_a_failure(wire: Any, first: Exception):
    one = wire("a:1,b:1", a=[first], b=["done"])
    assert one.ask() == "done"
    assert (one.called, one.waited_for) == (["a", "b"], [False, False])
    assert one.search.replicas.known()[0] == "b:1"


def test_relay_that_lost_the_coordinator_is_called_again(wire: Any):
    one = wire("a:1,b:1", a=[upstream_lost(), "done"])
    assert (one.ask(), one.called) == ("done", ["a", "a"])


def test_standby_names_the_leader(wire: Any):
    assert wire("a:1", a=[STANDS_BY], b=["done"]).ask() == "done"


def test_calls_go_on_without_a_leader_until_the_timeout(wire: Any):
    one = wire("a:1", a=[NOBODY, NOBODY, NOBODY, "done"])
    assert one.ask() == "done"
    one = wire("a:1,b:1", a=[NOBODY], b=[BROKEN])
    with pytest.raises(grpc.RpcError):
        one.ask(5.0)
    assert 3.0 < one.now < 5.1
    assert "a:1: UNAVAILABLE: nobody leads." in one.search.said
    assert "b:1: UNAVAILABLE: connection refused" in one.search.said


def test_leaders_refusal_is_raised(wire: Any):
    one = wire("a:1,b:1", a=[REFUSED], b=["done"])
    with pytest.raises(grpc.RpcError):
        one.ask()
    assert one.called == ["a"]


def test_timed_out_call_does_not_blame_its_address(wire: Any):
    held = Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    one = wire("a:1,b:1", a=[NOBODY, held], b=[NOBODY])
    with pytest.raises(grpc.RpcError):
        one.ask()
    assert one.called == ["a", "b", "a"]
    assert one.search.said == "a:1: UNAVAILABLE: nobody leads.; b:1: UNAVAILABLE: nobody leads."
    assert one.search.replicas.known() == ["a:1", "b:1"]
    one = wire("a:1", a=[held])
    with pytest.raises(grpc.RpcError):
        one.ask()
    assert one.search.said == "timeout (DEADLINE_EXCEEDED: Deadline Exceeded)"
