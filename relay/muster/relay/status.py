"""How a stream or a call ends, from a refusal."""

from typing import cast

import grpc
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from muster.v1 import session_pb2 as pb

MOST_MESSAGE = 3_000
"""Bytes of a status message, as the coordinator has it: it travels twice, in headers."""


def of(refusal: pb.Refusal) -> grpc.Status:
    """The status of a refusal, with its details."""
    data = refusal.message.encode()
    cut = (
        refusal.message if len(data) <= MOST_MESSAGE else f"{data[:MOST_MESSAGE].decode('utf-8', 'ignore')} …"
    )
    status = Status(code=refusal.code, message=cut, details=[refusal.error_info])
    return cast(grpc.Status, rpc_status.to_status(status))
