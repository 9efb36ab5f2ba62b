"""Ends a stream or a call with the status of a refusal."""

from typing import Any, cast

import grpc
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from muster.serving.ending import ended, header_text
from muster.v1 import session_pb2 as pb


async def end_with(refusal: pb.Refusal, context: Any) -> None:
    """End a stream or a call with the status of a refusal."""
    status = Status(code=refusal.code, message=header_text(refusal.message), details=[refusal.error_info])
    await ended(context.abort_with_status(cast(grpc.Status, rpc_status.to_status(status))))
