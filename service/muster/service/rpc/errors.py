"""The one map from a refusal to a gRPC status: invariant 16 (every refusal carries a reason)."""

from typing import cast

import grpc
from google.protobuf.any_pb2 import Any
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from muster.client.protocol import ERROR_DOMAIN
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.serving.ending import ended, header_text

CODES: dict[Reason, grpc.StatusCode] = {
    Reason.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.HELLO_REQUIRED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.HELLO_REPEATED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.PROTOCOL_VERSION: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NOT_JOINED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NOT_A_PARTICIPANT: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.RANK_NOT_IN_SESSION: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.STALE_GENERATION: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.SUPERSEDED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.SHAPE_CHANGED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.SEQUENCE_AHEAD: grpc.StatusCode.OUT_OF_RANGE,
    Reason.SEQUENCE_BEHIND: grpc.StatusCode.OUT_OF_RANGE,
    Reason.SEQUENCE_FORGOTTEN: grpc.StatusCode.OUT_OF_RANGE,
    Reason.LIMIT_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.RUN_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.BARRIER_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.NO_OPEN_BARRIER: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.SESSION_REPLACED: grpc.StatusCode.ABORTED,
    Reason.RUN_CLOSED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.RUN_STOPPED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.RUN_FORGOTTEN: grpc.StatusCode.ABORTED,
    Reason.RUN_IN_USE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.RENDEZVOUS_TIMED_OUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.NODE_REMOVED: grpc.StatusCode.ABORTED,
    Reason.NODE_NOT_NEEDED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NODE_EVICTED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.NODE_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.NO_SPARE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.SETTINGS_DIFFER: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.EVICTED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.MEMBER_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.NO_MEMBERS: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.RANKS_RECONNECT: grpc.StatusCode.UNAVAILABLE,
    Reason.NO_SAVE_ASKED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.COORDINATOR_DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.NOT_LEADER: grpc.StatusCode.UNAVAILABLE,
    Reason.SLOW_CONSUMER: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.STORE_TIMED_OUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.NOT_A_NUMBER: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.STALE_OPERATION: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.ATTEMPT_SUPERSEDED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.RECOVERY_SUPERSEDED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.RECOVERY_MISMATCHED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.KEEPER_NOT_CONNECTED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.TOKEN_MISSING: grpc.StatusCode.UNAUTHENTICATED,
    Reason.TOKEN_UNKNOWN: grpc.StatusCode.UNAUTHENTICATED,
    Reason.TOKEN_EXPIRED: grpc.StatusCode.UNAUTHENTICATED,
    Reason.KEYS_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Reason.ROLE_TOO_LOW: grpc.StatusCode.PERMISSION_DENIED,
    Reason.RUN_NOT_ALLOWED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.NODE_NOT_ALLOWED: grpc.StatusCode.PERMISSION_DENIED,
}

RETRY_AFTER_MS = 500
"""Milliseconds after which a draining coordinator advises to retry."""


def code(refusal: Refusal) -> int:
    """Return the canonical code (google.rpc.Code) of a refusal."""
    number: int = CODES[refusal.reason].value[0]
    return number


def error_info(refusal: Refusal) -> Any:
    """Return the refusal's ErrorInfo, packed."""
    packed = Any()
    packed.Pack(ErrorInfo(reason=refusal.reason.name, domain=ERROR_DOMAIN, metadata=refusal.metadata))
    return packed


async def end_with(refusal: Refusal, context: "grpc.aio.ServicerContext[object, object]") -> None:
    """End a call with the status of a refusal.

    The core's refusal of a call is in a future that a frame of its traceback refers to. This cycle would hold
    the call's request until the next full garbage collection.
    """
    refusal.forget_origin()
    await ended(context.abort_with_status(grpc_status(refusal)))


def grpc_status(refusal: Refusal) -> grpc.Status:
    """Return the status that ends a call, with its details."""
    message = header_text(refusal.message)
    status = Status(code=code(refusal), message=message, details=[error_info(refusal)])
    if refusal.reason is Reason.COORDINATOR_DRAINING:
        retry = RetryInfo()
        retry.retry_delay.FromMilliseconds(RETRY_AFTER_MS)
        packed = Any()
        packed.Pack(retry)
        status.details.append(packed)
    return cast(grpc.Status, rpc_status.to_status(status))
