"""Ending a call with a status, without garbage that only the collector of cycles would free."""

from collections.abc import Awaitable

import grpc


async def ended(abort: Awaitable[None]) -> None:
    """End a call.

    gRPC keeps the exception of the abort with the call, and its traceback keeps the call: a cycle that holds
    the call's messages, in gRPC's memory, until the next full garbage collection.

    Args:
        abort: from the call's context: ``context.abort(…)`` or ``context.abort_with_status(…)``. If it cannot
            be sent since the caller has gone or takes nothing, that is no error.
    """
    try:
        await abort
    except (grpc.aio.AbortError, grpc.aio.InternalError) as error:
        error.__traceback__ = error.__context__ = None
