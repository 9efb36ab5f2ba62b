"""A relay from its parts."""

import os
import socket
from dataclasses import dataclass, field

import grpc

from muster.relay.counts import Counts
from muster.relay.door import Door, OpenDoor
from muster.relay.line import PATIENCE
from muster.relay.listening import Listen
from muster.relay.relay import Relay
from muster.relay.serving import RelayServer
from muster.relay.upstream import Upstream
from muster.serving.options import MAX_CONNECTIONS

SOCKET_MODE = 0o600
"""Only the relay's own user may connect."""
MAX_MESSAGE_BYTES = 64 << 20
"""Of one message on a socket, where a node's own processes speak; the coordinator's bounds are below it."""


def _own_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """What a relay is to do."""

    listen: Listen
    upstream: str
    """The coordinator's endpoint: ``HOST:PORT``, several of them with commas between, or another relay's."""
    version: str
    name: str = field(default_factory=_own_name)
    """For people: its host and process id."""
    patience: float = PATIENCE
    """Seconds that the first of a node's arrivals waits for the others."""
    socket_mode: int = SOCKET_MODE
    tls: grpc.ServerCredentials | None = None
    door: Door = field(default_factory=OpenDoor)
    max_connections: int = MAX_CONNECTIONS
    max_message_bytes: int = MAX_MESSAGE_BYTES


async def start(config: RelayConfig, counts: Counts) -> RelayServer:
    """Start a relay on the running loop.

    Args:
        config: what it is to do.
        counts: what is measured.

    Raises:
        ListenError: it may not listen there.
        RuntimeError: gRPC cannot listen there.
    """
    config.listen.prepare()
    upstream = Upstream(
        config.upstream, name=config.name, version=config.version, counts=counts, patience=config.patience
    )
    relay = Relay(upstream.open_line, upstream.addresses, config.version)
    served = RelayServer(
        config.listen,
        upstream,
        relay,
        config.door,
        counts,
        max_connections=config.max_connections,
        max_message_bytes=config.max_message_bytes,
    )
    try:
        await served.start(config.tls, config.socket_mode)
    except BaseException:
        await served.stop()
        raise
    return served
