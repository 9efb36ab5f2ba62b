"""Errors of a command's calls, and which coordinator it calls."""

from typing import Any, cast

import grpc
import pytest
from typer import Exit as Ended

from muster.service.cli.client.coordinator_client import CallError, Client, connect, explain
from muster.service.cli.failure import Exit
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.rpc import errors


class Call(grpc.RpcError):
    """A call that has failed."""

    def __init__(self, code, details, metadata=()):
        self._answer = code, details, metadata

    def code(self):
        return self._answer[0]

    def details(self):
        return self._answer[1]

    def trailing_metadata(self):
        return self._answer[2]


def failed(code: grpc.StatusCode, details: str, metadata: Any = ()) -> grpc.Call:
    """As gRPC raises it: an error that is a call too."""
    return cast(grpc.Call, Call(code, details, metadata))


def refused(refusal: Refusal) -> grpc.Call:
    status = errors.grpc_status(refusal)
    return failed(status.code, status.details, status.trailing_metadata)


@pytest.mark.parametrize("reason", Reason)
def test_refusal_is_shown_in_the_coordinators_own_words(reason):
    error = explain(refused(Refusal(reason, "no such thing. Do that.")), "host:1", 10)
    assert str(error) == "no such thing. Do that."
    expected = {
        Reason.NO_OPEN_BARRIER: Exit.CLOSED,
        Reason.NO_SAVE_ASKED: Exit.CLOSED,
        Reason.COORDINATOR_DRAINING: Exit.UNREACHABLE,
        Reason.NOT_LEADER: Exit.UNREACHABLE,
    }
    assert error.code is expected.get(reason, Exit.FAILED)


def test_refusal_cannot_control_the_terminal():
    error = explain(refused(Refusal(Reason.RUN_NOT_FOUND, "no run \x1b[2J")), "host:1", 10)
    assert str(error) == "no run \\x1b[2J"


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (grpc.StatusCode.UNAVAILABLE, Exit.UNREACHABLE, "the coordinator at host:1 cannot be reached"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Exit.TIMED_OUT, "host:1 did not answer within 2.5 s"),
        (grpc.StatusCode.UNIMPLEMENTED, Exit.FAILED, "host:1 answered UNIMPLEMENTED"),
        (grpc.StatusCode.INTERNAL, Exit.FAILED, "host:1 answered INTERNAL"),
    ],
)
def test_failure_without_a_reason_names_address_error_and_next_step(status, code, said):
    error = explain(failed(status, "the last error"), "host:1", 2.5)
    assert error.code is code
    assert said in str(error)
    assert "the last error" in str(error)
    assert "\n  next: " in str(error)


def test_address_without_a_port_is_a_usage_error(capsys):
    with pytest.raises(Ended) as ended, connect("localhost", 1):
        raise AssertionError("it connected")
    assert ended.value.exit_code is Exit.USAGE
    assert '"localhost" is not HOST:PORT' in capsys.readouterr().err


def test_endpoint_is_one_address_or_several():
    assert Client(" a:1, b:1 ,a:1,[::1]:7550", 1).endpoint == "a:1,b:1,[::1]:7550"


@pytest.mark.parametrize(("endpoint", "bad"), [("a", "a"), ("a:1,b", "b"), ("a:1,", ""), ("a:1,b:x", "b:x")])
def test_endpoint_with_a_bad_part_names_that_part(endpoint: str, bad: str):
    with pytest.raises(ValueError, match=f'"{bad}" is not HOST:PORT'):
        Client(endpoint, 1)


class Coordinator:
    """One of several coordinators of a command; it fails as a test says, and then answers."""

    def __init__(self, *failures: grpc.Call) -> None:
        self.failures = list(failures)
        self.calls = 0
        self.metadata: list[Any] = []
        self.channel = self.coordinator = self

    def Status(self, request: object, *, timeout: float, metadata: Any) -> object:  # noqa: N802
        self.calls += 1
        self.metadata.append(dict(metadata)["muster-not-leader"])
        if self.failures:
            raise cast(grpc.RpcError, self.failures.pop(0))
        return request

    def Abort(self, request: object, *, timeout: float, metadata: Any) -> object:  # noqa: N802
        return self.Status(request, timeout=timeout, metadata=metadata)

    @property
    def barriers(self) -> "Coordinator":
        return self

    def close(self) -> None: ...


GONE = grpc.StatusCode.UNAVAILABLE, "failed to connect"
LOST = grpc.StatusCode.UNAVAILABLE, "Socket closed"


def client_of(**coordinators: Coordinator) -> Client:
    client = Client(",".join(f"{name}:1" for name in coordinators), 5)
    client._services = {f"{name}:1": cast(Any, one) for name, one in coordinators.items()}
    return client


def standby(leader: str = "") -> grpc.Call:
    return refused(Refusal(Reason.NOT_LEADER, "stands by.", leader=leader, replicas=""))


def test_command_follows_the_leader_that_a_standby_names():
    a, b, c = Coordinator(standby("c:1")), Coordinator(), Coordinator()
    client = client_of(a=a, b=b, c=c)
    client.status()
    client.status()
    assert (a.calls, b.calls, c.calls) == (1, 0, 2)


def test_command_waits_for_a_leader_while_standbys_answer():
    a, b = Coordinator(standby(), standby()), Coordinator(failed(*GONE), failed(*GONE))
    client_of(a=a, b=b).status()
    assert (a.calls, b.calls) == (3, 2)


def test_command_ends_after_one_turn_when_no_address_answers():
    a, b = Coordinator(*[failed(*GONE)] * 9), Coordinator(*[failed(*GONE)] * 9)
    with pytest.raises(CallError, match="no coordinator of a:1,b:1 can be reached\n  a:1: failed") as caught:
        client_of(a=a, b=b).status()
    assert (a.calls, b.calls, caught.value.code) == (1, 1, Exit.UNREACHABLE)


def test_request_that_may_have_been_carried_out_is_not_repeated():
    a, b = Coordinator(failed(*LOST)), Coordinator()
    with pytest.raises(CallError, match="whether the barrier was aborted is unknown"):
        client_of(a=a, b=b).abort("job", "checkpoint", "", None)
    assert (a.calls, b.calls) == (1, 0)


def test_lost_leader_is_named_to_the_standbys():
    a, b = Coordinator(), Coordinator()
    client = client_of(a=a, b=b)
    client.status()
    a.failures = [failed(*LOST), failed(*LOST)]
    client.status()
    assert (a.metadata, b.metadata) == (["", "", ""], ["a:1"])
