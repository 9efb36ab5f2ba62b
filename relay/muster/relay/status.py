"""How a stream or a call ends, from a refusal."""

from typing import Any, cast

import grpc
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from muster.serving.ending import ended
from muster.v1 import session_pb2 as pb

MOST_MESSAGE = 3_000
"""Bytes of a status message, as the coordinator has it: it travels twice, in headers."""


async def end_with(refusal: pb.Refusal, context: Any) -> None:
    """End a stream or a call with the status of a refusal."""
    await ended(context.abort_with_status(of(refusal)))


def of(refusal: pb.Refusal) -> grpc.Status:
    """The status of a refusal, with its details."""
    data = refusal.message.encode()
    cut = (
        refusal.message if len(data) <= MOST_MESSAGE else f"{data[:MOST_MESSAGE].decode('utf-8', 'ignore')} …"
    )
    status = Status(code=refusal.code, message=cut, details=[refusal.error_info])
    return cast(grpc.Status, rpc_status.to_status(status))
