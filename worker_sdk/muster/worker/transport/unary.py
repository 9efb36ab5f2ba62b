"""A unary call to whoever leads, outside of the store."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from muster.client.calls import ELSEWHERE, explain, reason_of, search_on
from muster.client.replicas import Search, Target

Response = TypeVar("Response")
Method = Callable[[grpc.Channel], Callable[..., Response]]
"""Picks a call of a stub that is laid over the channel."""


def ask_leader(
    search: Search,
    channel: Callable[[Target], AbstractContextManager[grpc.Channel]],
    method: Method[Response],
    request: Message,
    timeout: float,
    *,
    wait: bool,
) -> Response:
    """Send a request that may be carried out twice; where there are replicas, until one of them answers.

    Args:
        search: the way to the leader; what was met is found in it afterwards.
        channel: opens a channel for one call.
        method: what to call.
        request: with what.
        timeout: seconds for all of it.
        wait: for one that is alone and does not answer yet; the others of several are always asked.

    Raises:
        grpc.RpcError: the leader refused, or nobody answered in time; how the last call ended.
        EnvironmentValueError: the token or a certificate cannot be used.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            with channel(search.begin()) as opened:
                response = method(opened)(
                    request,
                    timeout=max(deadline - time.monotonic(), 0.0),
                    metadata=search.metadata,
                    wait_for_ready=wait and not search.replicas.several,
                )
            search.answered()
            return response
        except grpc.RpcError as error:
            reason = reason_of(error)
            if not reason and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                # All of the time is over, and a standby may have held the call for the rest of it.
                search.ran_out(explain(error))
                raise
            pause = search_on(search, error)
            goes_on = reason in ELSEWHERE or (not reason and search.replicas.several)
            if not goes_on or time.monotonic() + pause >= deadline:
                raise
        time.sleep(pause)
