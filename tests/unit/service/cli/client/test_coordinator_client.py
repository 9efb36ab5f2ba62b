from typing import Any, cast

import grpc
import pytest
from typer import Exit as Ended

from muster.service.cli.client.coordinator_client import connect, explain
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
def test_a_refusal_is_told_in_the_coordinators_own_words(reason):
    error = explain(refused(Refusal(reason, "no such thing. Do that.")), "host:1", 10)
    assert str(error) == "no such thing. Do that."
    expected = {
        Reason.NO_OPEN_BARRIER: Exit.CLOSED,
        Reason.NO_SAVE_ASKED: Exit.CLOSED,
        Reason.COORDINATOR_DRAINING: Exit.UNREACHABLE,
        Reason.NOT_LEADER: Exit.UNREACHABLE,
    }
    assert error.code is expected.get(reason, Exit.FAILED)


def test_a_refusal_cannot_speak_to_the_terminal():
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
def test_what_no_coordinator_said_names_address_error_and_next_step(status, code, said):
    error = explain(failed(status, "the last error"), "host:1", 2.5)
    assert error.code is code
    assert said in str(error)
    assert "the last error" in str(error)
    assert "\n  next: " in str(error)


def test_an_address_without_a_port_is_a_usage_error(capsys):
    with pytest.raises(Ended) as ended, connect("localhost", 1):
        raise AssertionError("it connected")
    assert ended.value.exit_code is Exit.USAGE
    assert '"localhost" is not HOST:PORT' in capsys.readouterr().err
