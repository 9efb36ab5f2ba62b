"""This process's channels to the coordinator, and one for all that is no session."""

import os
import threading
import weakref
from dataclasses import dataclass

import grpc

from muster.client.calls import channel_options
from muster.client.credentials import Credentials
from muster.client.errors import EnvironmentValueError
from muster.client.replicas import FIRST_BACKOFF, MAX_BACKOFF, Target
from muster.worker.transport import fork_guard

SHARED_OPTIONS = [
    # A channel that lives on must not wait for long before it tries again; its callers pause by themselves.
    ("grpc.initial_reconnect_backoff_ms", round(FIRST_BACKOFF * 1000)),
    ("grpc.max_reconnect_backoff_ms", round(MAX_BACKOFF * 1000)),
]

_lock = threading.Lock()


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class SharedChannel:
    """The channel of this process for calls and stores' streams; it ends when nobody holds it any more."""

    channel: grpc.Channel
    certificates: tuple[bytes, ...]
    """What it was opened with."""


_channels: "weakref.WeakValueDictionary[Target, SharedChannel]" = weakref.WeakValueDictionary()


def open_channel(target: Target) -> grpc.Channel:
    """A channel to the coordinator, with what the environment says of token and certificates now.

    Args:
        target: whom to call, and how to connect.

    Raises:
        EnvironmentValueError: the token or a certificate cannot be used.
    """
    credentials = Credentials.toward(target.address)
    return credentials.open_channel(target.address, channel_options(target), target.tls_name)


def shared_channel(target: Target, *, renew: bool = False) -> SharedChannel:
    """The process's channel for calls and stores' streams; it is opened when nobody holds one.

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
            credentials = Credentials.toward(target.address)
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


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
