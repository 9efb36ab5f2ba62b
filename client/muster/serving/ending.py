"""Ends a call with a status, without garbage that only the collector of cycles would free."""

from collections.abc import Awaitable

import grpc

MAX_STATUS_BYTES = 3_000
"""Bytes of a status message. It travels twice in the headers, once with three bytes for each that is not
ASCII, and gRPC's clients accept 16 KiB of headers."""


def header_text(message: str) -> str:
    """Return a message short enough for a status; messages on streams are not cut."""
    data = message.encode()
    if len(data) <= MAX_STATUS_BYTES:
        return message
    return f"{data[:MAX_STATUS_BYTES].decode('utf-8', 'ignore')} …"


async def ended(abort: Awaitable[None]) -> None:
    """End a call.

    gRPC keeps the exception of the abort with the call, and its traceback keeps the call. This cycle would
    hold the call's messages, in gRPC's memory, until the next full garbage collection.

    Args:
        abort: from the call's context: ``context.abort(…)`` or ``context.abort_with_status(…)``. It is no
            error if the caller has gone or reads nothing.
    """
    try:
        await abort
    except (grpc.aio.AbortError, grpc.aio.InternalError) as error:
        error.__traceback__ = error.__context__ = None
