"""A relay from its parts."""

from dataclasses import dataclass, field

import grpc

from muster.relay.counts import Counts
from muster.relay.door import Door, OpenDoor
from muster.relay.line import PATIENCE
from muster.relay.listening import Listen
from muster.relay.relay import Relay
from muster.relay.serving import RelayServer
from muster.relay.upstream import Upstream

SOCKET_MODE = 0o600
"""Only the relay's own user may connect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """What a relay is to do."""

    listen: Listen
    upstream: str
    """The coordinator's endpoint: ``HOST:PORT``, several of them with commas between, or another relay's."""
    name: str
    """For people: its host and process id."""
    version: str
    patience: float = PATIENCE
    """Seconds that the first of a node's arrivals waits for the others."""
    socket_mode: int = SOCKET_MODE
    tls: grpc.ServerCredentials | None = None
    door: Door = field(default_factory=OpenDoor)


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
    served = RelayServer(upstream, relay, config.door, counts)
    if config.tls is not None:
        served.server.add_secure_port(config.listen.target, config.tls)
    else:
        served.server.add_insecure_port(config.listen.target)
    config.listen.restrict(config.socket_mode)
    await served.server.start()
    return served
