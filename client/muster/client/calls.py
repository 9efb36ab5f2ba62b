"""Calls to the coordinator: their channels, and how to read their failures."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import grpc
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status

from muster.client.addresses import target_of
from muster.client.credentials import TOKEN_REFUSED, Credentials
from muster.client.replicas import Search, Target

MAX_METADATA_BYTES = 131_072
"""Bytes of a call's headers."""

CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC's transparent retry loses the end of a call that meets a GOAWAY; then its reader waits for ever.
    ("grpc.enable_retries", 0),
    # Probing for bandwidth sends a ping for each small message.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # A server closes a connection without calls after 10 s, of which gRPC prints a line to stderr. So the
    # client closes it first, which may take up to twice this time.
    ("grpc.client_idle_timeout_ms", 4_000),
    # A refusal names nodes, and travels in a header.
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
]

NOT_LEADER, DRAINING = "NOT_LEADER", "COORDINATOR_DRAINING"
RELAY_CUT_OFF, UPSTREAM_LOST = "RELAY_CUT_OFF", "UPSTREAM_LOST"
KEYS_UNAVAILABLE = "KEYS_UNAVAILABLE"
ELSEWHERE = frozenset({NOT_LEADER, DRAINING, RELAY_CUT_OFF, UPSTREAM_LOST, KEYS_UNAVAILABLE})
"""Reasons for which a caller tries elsewhere, and nothing has failed. A coordinator does not lead, is about
to stop, or cannot check a token now; or a relay does not reach the leader, or has just lost it."""


def channel_options(target: Target) -> list[tuple[str, Any]]:
    """Return the options of a channel to the coordinator."""
    timers = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    return [
        *CHANNEL_OPTIONS,
        # gRPC's name is misleading: it is the time that one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", target.connect_timeout_ms),
        *((timer, target.keepalive_ms) for timer in timers),
    ]


def open_aio_channel(
    target: Target, credentials: Credentials, options: Sequence[tuple[str, Any]] = ()
) -> grpc.aio.Channel:
    """Open a channel of asyncio to the coordinator. Its calls take their headers from :func:`call_headers`.

    Args:
        target: the coordinator.
        credentials: valid for its address.
        options: gRPC's, in addition to :func:`channel_options`.

    Raises:
        EnvironmentValueError: a file of the credentials cannot be used, or one that it needs is missing.
    """
    address, options = target_of(target.address), [*channel_options(target), *options]
    tls = credentials.channel_credentials()
    if tls is None:
        credentials.warn_if_readable(target.address)
        return grpc.aio.insecure_channel(address, options=options)
    named = [*options, *credentials.name_options(target.tls_name)]
    return grpc.aio.secure_channel(address, tls, options=named)


async def call_headers(search: Search, credentials: Credentials) -> list[tuple[str, str]]:
    """Return the headers of a call. A token's command runs beside the event loop.

    Raises:
        EnvironmentValueError: the token cannot be used.
    """
    if credentials.token_command:
        authorization = await asyncio.to_thread(credentials.authorization)
    else:
        authorization = credentials.authorization()
    return [*search.metadata, *([("authorization", authorization)] if authorization else [])]


def explain(error: grpc.RpcError) -> str:
    """Return a failed call's error in a few words; the exception is also the call, which has the status."""
    code = getattr(error, "code", None)
    details = getattr(error, "details", None)
    if not (code and details):
        return repr(error)
    if code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"timeout ({code().name}: {details()})"
    # A socket has no TLS, so gRPC's own details are enough.
    fault = None if "unix:" in details() else Credentials.of().fault(str(details()))
    return f"{code().name}: {fault or details()}"


def reason_of(error: grpc.RpcError | grpc.Call) -> str:
    """Return the reason of the coordinator's refusal; empty if the coordinator did not refuse the call."""
    return str(error_info(error).reason)


def error_info(error: grpc.RpcError | grpc.Call) -> ErrorInfo:
    """Return a refusal's details for programs; empty if the coordinator did not refuse the call."""
    info = ErrorInfo()
    try:
        status = rpc_status.from_call(cast(grpc.Call, error))
    except ValueError:
        return info
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            break
    return info


def search_on(search: Search, error: grpc.RpcError, why: str = "") -> float:
    """Continue a search after a call that failed.

    Args:
        search: the search that led to the call.
        error: how the call ended.
        why: the same, for people; empty: as :func:`explain`.

    Returns:
        Seconds to wait before the next call.
    """
    info, why = error_info(error), why or explain(error)
    if info.reason == NOT_LEADER:
        replicas = info.metadata.get("replicas", "").split(",")
        return search.not_leader(info.metadata.get("leader", ""), replicas, why)
    if info.reason in (DRAINING, RELAY_CUT_OFF):
        return search.left(why)
    if info.reason in TOKEN_REFUSED:
        Credentials.of().refused()
        return search.denied(why)
    # All other reasons come from the leader, or from a relay that searches for the leader itself.
    return search.again(why) if info.reason else search.failed(why)
