"""This process's channels to the coordinator."""

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
    # A long-lived channel must reconnect soon: its callers pause by themselves.
    ("grpc.initial_reconnect_backoff_ms", round(FIRST_BACKOFF * 1000)),
    ("grpc.max_reconnect_backoff_ms", round(MAX_BACKOFF * 1000)),
]

_lock = threading.Lock()


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class SharedChannel:
    """This process's channel for calls and stores' streams. It ends with the last reference to it."""

    channel: grpc.Channel
    certificates: tuple[bytes, ...]
    """The certificates with which it was opened."""


_channels: "weakref.WeakValueDictionary[Target, SharedChannel]" = weakref.WeakValueDictionary()


def open_channel(target: Target) -> grpc.Channel:
    """Open a channel to the coordinator, with the environment's present token and certificates.

    Args:
        target: the address, and how to connect.

    Raises:
        EnvironmentValueError: the token or a certificate cannot be used.
    """
    credentials = Credentials.toward(target.address)
    return credentials.open_channel(target.address, channel_options(target), target.tls_name)


def shared_channel(target: Target, *, renew: bool = False) -> SharedChannel:
    """Return the process's channel for calls and stores' streams; open it if none exists yet.

    Args:
        target: the address, and how to connect.
        renew: open another one if the certificates have changed. A channel keeps its certificates for life,
            so check after it has failed.

    Raises:
        EnvironmentValueError: the token or a certificate cannot be used, and there is no channel yet.
        MusterError: this process was forked from one that uses gRPC.
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
            # The old channel stays open: others may have calls on it. It ends with the last of them.
            shared = _channels[target] = _open_shared(target, credentials, certificates)
        except EnvironmentValueError:
            if known is None:
                raise
            return known  # Files that are being replaced may be unusable for a moment.
        return shared


def _open_shared(target: Target, credentials: Credentials, certificates: tuple[bytes, ...]) -> SharedChannel:
    # Before gRPC starts: a child that another thread forks meanwhile must see that it cannot use gRPC.
    usage = fork_guard.GrpcUsage("a store")
    try:
        options = [*channel_options(target), *SHARED_OPTIONS]
        channel = credentials.open_channel(target.address, options, target.tls_name)
        shared = SharedChannel(channel, certificates)
        weakref.finalize(shared, usage.end).atexit = False
    except BaseException:
        usage.end()
        raise
    return shared


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
