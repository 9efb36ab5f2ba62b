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
from muster.worker.replicas import FIRST_BACKOFF, MOST_BACKOFF, Search, Target

PROTOCOL_VERSION = 1
"""The version of ``muster.v1`` that this SDK speaks on its streams."""

MOST_METADATA = 131_072
"""Bytes of a call's headers."""

CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC's transparent retry loses the end of a call that meets a GOAWAY; its reader then waits for ever.
    ("grpc.enable_retries", 0),
    # Probing for bandwidth sends a ping for each small message.
    ("grpc.http2.bdp_probe", 0),
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

NOT_LEADER, DRAINING = "NOT_LEADER", "COORDINATOR_DRAINING"
"""Reasons of a coordinator that does not lead, or soon will not: nothing has failed."""

_lock = threading.Lock()


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class SharedChannel:
    """The channel of this process for unary calls to a coordinator; it ends when nobody holds it any more."""

    channel: grpc.Channel
    certificates: tuple[bytes, ...]
    """What it was opened with."""


_channels: "weakref.WeakValueDictionary[Target, SharedChannel]" = weakref.WeakValueDictionary()


def channel_options(target: Target) -> list[tuple[str, Any]]:
    """The options of a channel to the coordinator."""
    timers = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    return [
        *CHANNEL_OPTIONS,
        # gRPC's name is misleading: it is the time that one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", target.connect_timeout_ms),
        *((timer, target.keepalive_ms) for timer in timers),
    ]


def open_channel(target: Target) -> grpc.Channel:
    """A channel to the coordinator, with what the environment says of token and certificates now.

    Args:
        target: whom to call, and how to connect.

    Raises:
        EnvironmentValueError: the token or a certificate cannot be used.
    """
    return Credentials.of().open_channel(target.address, channel_options(target), target.tls_name)


def shared_channel(target: Target, *, renew: bool = False) -> SharedChannel:
    """The process's channel for unary calls to a coordinator; it is opened when nobody holds one.

    Args:
        target: whom to call, and how to connect.
        renew: open it anew if the certificates are others now than those that it was opened with. A channel
            shows the same ones for as long as it lives; that it has failed is the time to look.

    Raises:
        EnvironmentValueError: the token or a certificate cannot be used, and there is no channel yet.
        MusterError: this process was forked from one that speaks gRPC.
    """
    fork_guard.check()
    with _lock:
        known = _channels.get(target)
        if known is not None and not renew:
            return known
        try:
            credentials = Credentials.of()
            certificates = credentials.certificates()
            if known is not None and known.certificates == certificates:
                return known
            # The one before is not closed: others may have calls on it, and it ends with the last of them.
            shared = _channels[target] = _open_shared(target, credentials, certificates)
        except EnvironmentValueError:
            if known is None:
                raise
            return known  # Files that are being replaced may be unusable for a moment.
        return shared


def _open_shared(target: Target, credentials: Credentials, certificates: tuple[bytes, ...]) -> SharedChannel:
    # First: a child that another thread forks while gRPC begins must find that it cannot speak.
    claim = fork_guard.Claim("a store")
    try:
        options = [*channel_options(target), *SHARED_OPTIONS]
        channel = credentials.open_channel(target.address, options, target.tls_name)
        shared = SharedChannel(channel, certificates)
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
    return str(error_info(error).reason)


def error_info(error: grpc.RpcError) -> ErrorInfo:
    """The details of the coordinator's refusal for programs; empty if the call did not end by its word."""
    info = ErrorInfo()
    try:
        status = rpc_status.from_call(cast(grpc.Call, error))
    except ValueError:
        return info
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            break
    return info


def search_on(search: Search, error: grpc.RpcError) -> float:
    """Go on with a search after a call that failed.

    Args:
        search: whose call it was.
        error: how it ended.

    Returns:
        Seconds to wait before the next call.
    """
    info, why = error_info(error), explain(error)
    if info.reason == NOT_LEADER:
        replicas = info.metadata.get("replicas", "").split(",")
        return search.not_leader(info.metadata.get("leader", ""), replicas, why)
    if info.reason == DRAINING:
        return search.left(why)
    # Any other reason is the leader's own word.
    return search.again(why) if info.reason else search.failed(why)


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
