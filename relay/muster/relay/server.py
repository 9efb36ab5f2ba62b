"""A relay's server, and how it is put together."""

import logging
import os
import socket
from dataclasses import dataclass, field

import grpc

from muster.relay.authenticator import AllowAll, Authenticator
from muster.relay.forwarding import CallForwarder
from muster.relay.listen_address import ListenAddress
from muster.relay.router import StreamRouter
from muster.relay.sessions import Sessions
from muster.relay.stats import RelayStats
from muster.relay.upstream import Upstream
from muster.relay.upstream_stream import FOLD_WINDOW
from muster.serving.keepalive import Keepalive
from muster.serving.options import MAX_CONNECTIONS, server_options
from muster.serving.writes import Writes

logger = logging.getLogger(__name__)

SOCKET_MODE = 0o600
"""Only the relay's own user may connect."""
MAX_MESSAGE_BYTES = 64 << 20
"""Bytes of one message on a socket, where a node's own processes speak; the coordinator's limit is lower."""
KEEPALIVE = Keepalive(interval=1.0, timeout=1.0)
"""A coordinator with the shortest session TTL pings as often, so a death is noticed no later than without the
relay."""
MAX_STREAMS = 20_000
"""Streams and calls at once."""


def _own_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayConfig:
    """The settings of a relay."""

    listen: ListenAddress
    upstream: str
    """The coordinator's endpoint: ``HOST:PORT``, several of them with commas between, or another relay's."""
    version: str
    name: str = field(default_factory=_own_name)
    """For people: its host and process id."""
    in_agent: bool = False
    """Whether the node's agent joins through it and is the same process."""
    fold_window: float = FOLD_WINDOW
    """Seconds that the first of a node's arrivals waits for the others."""
    socket_mode: int = SOCKET_MODE
    tls: grpc.ServerCredentials | None = None
    """The certificate of a port; None: without TLS."""
    authenticator: Authenticator = field(default_factory=AllowAll)
    max_connections: int = MAX_CONNECTIONS
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """Bytes of one message of a caller. The Welcome says what the coordinator accepts."""


class RelayServer:
    """A relay that listens.

    Args:
        config: its settings. The listen address is prepared.
        stats: what is measured.
    """

    def __init__(self, config: RelayConfig, stats: RelayStats) -> None:
        self._config = config
        self._upstream = Upstream(
            config.upstream,
            name=config.name,
            in_agent=config.in_agent,
            version=config.version,
            stats=stats,
            fold_window=config.fold_window,
        )
        router = StreamRouter(self._upstream.open_stream, self._upstream.addresses, config.version)
        writes = Writes(_log_slow_reader)
        self._sessions = Sessions(router, config.authenticator, stats, writes)
        self._forwarder = CallForwarder(self._upstream, config.authenticator, stats, writes)
        self._server = grpc.aio.server(
            options=server_options(
                max_streams=MAX_STREAMS,
                max_connections=config.max_connections,
                max_message_bytes=config.max_message_bytes,
                keepalive=KEEPALIVE,
            )
        )
        self._server.add_generic_rpc_handlers((self._sessions, self._forwarder))

    async def start(self) -> None:
        """Start to listen. Call :meth:`stop` afterwards, also if this fails.

        Raises:
            OSError: the socket's permissions cannot be set.
            RuntimeError: gRPC cannot listen there.
        """
        listen = self._config.listen
        if self._config.tls is not None:
            self._server.add_secure_port(listen.target, self._config.tls)
        else:
            self._server.add_insecure_port(listen.target)
        listen.restrict(self._config.socket_mode)
        await self._server.start()

    async def stop(self, grace: float = 1.0) -> None:
        """Ask all callers to connect elsewhere, stop, and remove the socket.

        Args:
            grace: seconds that calls in flight get.
        """
        self._sessions.drain()
        self._forwarder.drain()
        await self._server.stop(grace)
        await self._upstream.close()
        self._config.listen.remove()


async def start(config: RelayConfig, stats: RelayStats) -> RelayServer:
    """Start a relay on the running loop.

    Args:
        config: its settings.
        stats: what is measured.

    Raises:
        ListenError: it may not listen there.
        RuntimeError: gRPC cannot listen there.
    """
    config.listen.prepare()
    served = RelayServer(config, stats)
    try:
        await served.start()
    except BaseException:
        await served.stop()
        raise
    return served


def _log_slow_reader(reader: str, size: int) -> None:
    logger.warning("%s did not read %d bytes in time: its connection is ended", reader, size)
