"""A unary call to the leading coordinator, outside of the store."""

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
"""Selects a call of a stub on the channel."""


def ask_leader(
    search: Search,
    channel: Callable[[Target], AbstractContextManager[grpc.Channel]],
    method: Method[Response],
    request: Message,
    timeout: float,
    *,
    wait: bool,
) -> Response:
    """Send an idempotent request to the leader. If there are replicas, try until one answers.

    Args:
        search: finds the leader; afterwards it has the errors of all attempts.
        channel: opens a channel for one call.
        method: the call.
        request: its message.
        timeout: seconds for all attempts.
        wait: whether to wait for a single coordinator that does not answer yet.

    Raises:
        grpc.RpcError: the leader refused, or none answered in time; the last call's error.
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
                # The time is over. A standby may have held the call for the rest of it.
                search.ran_out(explain(error))
                raise
            pause = search_on(search, error)
            goes_on = reason in ELSEWHERE or (not reason and search.replicas.several)
            if not goes_on or time.monotonic() + pause >= deadline:
                raise
        time.sleep(pause)
