"""The rich status of a refusal: made as a server makes it, and read as a client reads it."""

import grpc
from google.protobuf.any_pb2 import Any
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status


def rich_status(
    reason: str, message: str, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE, **metadata: str
) -> grpc.Status:
    """Make a status with an ErrorInfo."""
    detail = Any()
    detail.Pack(ErrorInfo(reason=reason, domain="muster", metadata=metadata))
    status = rpc_status.to_status(Status(code=code.value[0], message=message, details=[detail]))
    assert isinstance(status, grpc.Status)
    return status


def reason_of(error: grpc.RpcError) -> str:
    """Return the reason in the ErrorInfo of a refusal."""
    status = rpc_status.from_call(error)
    assert status is not None, error
    info = ErrorInfo()
    assert status.details[0].Unpack(info)
    return str(info.reason)
