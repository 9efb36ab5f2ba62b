from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from muster.service.core.vocabulary.refusal import Reason, Refusal, limit_exceeded
from muster.service.draining import DRAINING
from muster.service.rpc import errors

DOCS = Path(__file__).parents[4] / "docs" / "errors.md"


def details(refusal: Refusal) -> tuple[grpc.StatusCode, Status, list[Any]]:
    """The code of the call, the rich status in its trailers, and its details unpacked."""
    ended = errors.grpc_status(refusal)
    ((key, data),) = ended.trailing_metadata
    assert key == "grpc-status-details-bin"
    status = Status.FromString(data)
    assert (status.code, status.message) == (ended.code.value[0], ended.details)
    kinds = {"google.rpc.ErrorInfo": ErrorInfo, "google.rpc.RetryInfo": RetryInfo}
    unpacked = []
    for packed in status.details:
        message = kinds[packed.TypeName()]()
        assert packed.Unpack(message)
        unpacked.append(message)
    return ended.code, status, unpacked


def test_every_reason_has_a_code():
    assert set(errors.CODES) == set(Reason)


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_explained_in_the_docs_with_its_code(reason: Reason):
    assert DOCS.read_text().count(f"\n| `{reason.name}` | {errors.CODES[reason].name} | ") == 1


@pytest.mark.parametrize("reason", Reason)
def test_every_refusal_is_an_error_with_its_reason_and_its_sentence(reason: Reason):
    refusal = Refusal(reason, 'no "ü". Do that.', limit="max_runs", value=7)
    code, status, (info, *more) = details(refusal)
    assert code is errors.CODES[reason]
    assert code is not grpc.StatusCode.OK
    assert status.message == 'no "ü". Do that.'
    assert (info.reason, info.domain) == (reason.name, "muster")
    assert info.metadata == {"limit": "max_runs", "value": "7"}
    assert errors.code(refusal) == code.value[0]
    assert bool(more) == (reason is Reason.COORDINATOR_DRAINING)


@pytest.mark.parametrize("reason", Reason)
def test_reasons_have_the_form_that_the_standard_demands(reason: Reason):
    assert reason.name.isascii()
    assert reason.name == reason.name.upper()
    assert len(reason.name) <= 63


def test_only_transient_refusals_have_codes_that_clients_retry():
    """gRPC's own retry policies, and many clients, try again on UNAVAILABLE whatever it says."""
    retried = [r for r, code in errors.CODES.items() if code is grpc.StatusCode.UNAVAILABLE]
    assert retried == [
        Reason.RANKS_RECONNECT,
        Reason.COORDINATOR_DRAINING,
        Reason.NOT_LEADER,
        Reason.KEYS_UNAVAILABLE,
    ]


def test_draining_coordinator_says_when_to_come_back():
    code, _, (info, retry) = details(DRAINING)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert info.reason == "COORDINATOR_DRAINING"
    assert retry.retry_delay.ToMilliseconds() == errors.RETRY_AFTER_MS


def test_limit_is_named_for_people_and_for_programs():
    code, status, (info,) = details(limit_exceeded("max_runs", 1000, "1,000 runs are known"))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_runs is 1,000" in status.message
    assert info.metadata == {"limit": "max_runs", "value": "1000"}
