"""Channels to the coordinator: their options, and one for all unary calls of this process."""

import os
import threading
import weakref
from dataclasses import dataclass
from typing import Any, cast

import grpc
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status

from muster.worker import fork_guard
from muster.worker.credentials import Credentials
from muster.worker.environment import EnvironmentValueError

PROTOCOL_VERSION = 1
"""The version of ``muster.v1`` that this SDK speaks on its streams."""
KEEPALIVE_MS = 3_333
"""Ping after so long without data, and give up after so long without an answer: a third of the
coordinator's default session TTL each, so that a dead connection is replaced within the TTL. A
coordinator with a shorter TTL says so in its Welcome, and the session is opened anew with a third of that."""
CONNECT_TIMEOUT_MS = 5_000
"""For one attempt to connect, where nobody answers; a refusal ends it at once."""
FIRST_BACKOFF = 0.1
MOST_BACKOFF = 2.0
"""Seconds between attempts, jittered; well below the session TTL."""

MOST_METADATA = 131_072
"""Bytes of a call's headers."""

CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC's transparent retry loses the end of a call that meets a GOAWAY; its reader then waits for ever.
    ("grpc.enable_retries", 0),
    # Probing for bandwidth sends a ping for each small message.
    ("grpc.http2.bdp_probe", 0),
    # gRPC's name is misleading: it is the time that one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # A refusal names nodes, and travels in a header.
    ("grpc.max_metadata_size", MOST_METADATA),
    ("grpc.absolute_max_metadata_size", MOST_METADATA),
]
SHARED_OPTIONS = [
    # A channel that lives on must not wait for long before it tries again; its callers pause by themselves.
    ("grpc.initial_reconnect_backoff_ms", round(FIRST_BACKOFF * 1000)),
    ("grpc.max_reconnect_backoff_ms", round(MOST_BACKOFF * 1000)),
]

_lock = threading.Lock()


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class SharedChannel:
    """The channel of this process for unary calls to a coordinator; it ends when nobody holds it any more."""

    channel: grpc.Channel
    certificates: tuple[bytes, ...]
    """What it was opened with."""


_channels: "weakref.WeakValueDictionary[str, SharedChannel]" = weakref.WeakValueDictionary()
"""By endpoint."""


def channel_options(keepalive_ms: int) -> list[tuple[str, Any]]:
    """The options of a channel to the coordinator.

    Args:
        keepalive_ms: milliseconds without data after which to ping, and again for the answer.
    """
    timers = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    return [*CHANNEL_OPTIONS, *((timer, keepalive_ms) for timer in timers)]


def open_channel(endpoint: str, keepalive_ms: int) -> grpc.Channel:
    """A channel to the coordinator, with what the environment says of token and certificates now.

    Args:
        endpoint: ``HOST:PORT``.
        keepalive_ms: as in :func:`channel_options`.

    Raises:
        EnvironmentValueError: the token or a certificate cannot be used.
    """
    return Credentials.of().open_channel(endpoint, channel_options(keepalive_ms))


def shared_channel(endpoint: str, *, renew: bool = False) -> SharedChannel:
    """The process's channel for unary calls to a coordinator; it is opened when nobody holds one.

    Args:
        endpoint: ``HOST:PORT``.
        renew: open it anew if the certificates are others now than those that it was opened with. A channel
            shows the same ones for as long as it lives; that it has failed is the time to look.

    Raises:
        EnvironmentValueError: the token or a certificate cannot be used, and there is no channel yet.
        MusterError: this process was forked from one that speaks gRPC.
    """
    fork_guard.check()
    with _lock:
        known = _channels.get(endpoint)
        if known is not None and not renew:
            return known
        try:
            credentials = Credentials.of()
            certificates = credentials.certificates()
            if known is not None and known.certificates == certificates:
                return known
            # The one before is not closed: others may have calls on it, and it ends with the last of them.
            shared = _channels[endpoint] = _open_shared(endpoint, credentials, certificates)
        except EnvironmentValueError:
            if known is None:
                raise
            return known  # Files that are being replaced may be unusable for a moment.
        return shared


def _open_shared(endpoint: str, credentials: Credentials, certificates: tuple[bytes, ...]) -> SharedChannel:
    # First: a child that another thread forks while gRPC begins must find that it cannot speak.
    claim = fork_guard.Claim("a store")
    try:
        options = [*channel_options(KEEPALIVE_MS), *SHARED_OPTIONS]
        shared = SharedChannel(credentials.open_channel(endpoint, options), certificates)
        weakref.finalize(shared, claim.give_back).atexit = False
    except BaseException:
        claim.give_back()
        raise
    return shared


def explain(error: grpc.RpcError) -> str:
    """A failed call in a few words; its error is also the call, which knows the status."""
    code = getattr(error, "code", None)
    details = getattr(error, "details", None)
    if not (code and details):
        return repr(error)
    if code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"timeout ({code().name}: {details()})"
    fault = Credentials.of().fault(str(details()))
    return f"{code().name}: {fault or details()}"


def reason_of(error: grpc.RpcError) -> str:
    """The stable reason of the coordinator's refusal; empty if the call did not end by its word."""
    try:
        status = rpc_status.from_call(cast(grpc.Call, error))
    except ValueError:
        return ""
    info = ErrorInfo()
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            return str(info.reason)
    return ""


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
