"""Limits of the HTTP port: the number of connections, and how long each may be silent."""

import asyncio
import functools
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import structlog
from aiohttp import web

MAX_CONNECTIONS = 128
"""Connections open at once, including those in a TLS handshake. With TLS, each takes 300 KiB."""
CLOSED_AT_ONCE = 16
"""Connections closed at once when the limit is reached, so that the search for them is rare."""
FULL_PAUSE = 0.001
"""Seconds until the next is accepted then, so that clients that reconnect at once do not starve others."""
SILENCE_TIMEOUT = 10.0
"""Seconds within which a request must be complete, since the connection began or the last response."""
TLS_TIMEOUT = 10.0
"""Seconds that a TLS handshake, or the end of TLS, may take."""
ACCEPT_PAUSE = 1.0
"""Seconds until the next attempt to accept, after the system had no room for a connection."""


class _Beginning(NamedTuple):
    """An accepted connection."""

    address: str
    handler: web.RequestHandler

    @property
    def made(self) -> bool:
        """Whether the server counts it."""
        return self.handler.transport is not None


class BoundedSite(web.BaseSite):
    """A TCP address that accepts a limited number of connections at once.

    At the limit it closes the oldest connections of the client address that has most. So a short probe is
    answered, even if other clients hold their connections open in silence.

    It counts connections from the moment that it accepts them. asyncio's own server counts them after the
    TLS handshake, and until then a silent client could hold any number of files.

    Args:
        runner: serves the connections; it must be set up.
        host: where to listen.
        port: the port; 0 for any.
        ssl_context: for TLS.
        max_connections: connections open at once.
    """

    def __init__(
        self,
        runner: web.AppRunner,
        host: str,
        port: int,
        ssl_context: ssl.SSLContext | None = None,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        super().__init__(runner, ssl_context=ssl_context)
        self._host = host
        self._port = port
        self._max_connections = max_connections
        self._listening: list[socket.socket] = []
        self._takers: list[asyncio.Task[None]] = []
        self._beginning: dict[asyncio.Task[None], _Beginning] = {}

    @property
    def name(self) -> str:
        """Return where it listens."""
        return f"{'https' if self._ssl_context else 'http'}://{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address cannot be bound.
        """
        await super().start()
        server = self._runner.server
        assert server is not None
        # It only binds every address of the host; `_take` accepts the connections.
        bind = functools.partial(asyncio.get_running_loop().create_server, server, start_serving=False)
        if self._host == "::" and socket.has_dualstack_ipv6():
            # asyncio leaves IPv4 out; gRPC listens on both.
            every = socket.create_server(
                (self._host, self._port), family=socket.AF_INET6, dualstack_ipv6=True
            )
            self._server = bound = await bind(sock=every)
        else:
            self._server = bound = await bind(self._host, self._port)
        for address in bound.sockets:
            listening = address.dup()
            listening.setblocking(False)
            listening.listen(self._backlog)
            self._listening.append(listening)
            self._takers.append(asyncio.create_task(self._take(listening, server)))

    async def stop(self) -> None:
        """Stop accepting, and close the connections in a TLS handshake."""
        tasks = [*self._takers, *self._beginning]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listening in self._listening:
            listening.close()
        await super().stop()

    async def _take(self, listening: socket.socket, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(listening)
            except ConnectionError:
                continue  # The client disconnected first.
            except OSError as error:
                structlog.get_logger().warning("http.accept_failed", error=str(error))
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            self._begin(connection, server, peer[0])
            beginning = sum(not one.made for one in self._beginning.values())
            if beginning + len(server.connections) > self._max_connections:
                self._make_room(server)
                await asyncio.sleep(FULL_PAUSE)
            await asyncio.sleep(0)  # Let other tasks run between two connections.

    def _make_room(self, server: web.Server) -> None:
        held: dict[str, list[Callable[[], object]]] = {}
        for handler in server.connections:
            if (transport := handler.transport) is not None:
                address, *_ = transport.get_extra_info("peername") or ("",)
                held.setdefault(address, []).append(transport.abort)
        for task, one in self._beginning.items():
            if not one.made:
                held.setdefault(one.address, []).append(task.cancel)
        most = max(held.values(), key=len)
        for close in most[: max(1, min(CLOSED_AT_ONCE, len(most) // 2))]:
            close()

    def _begin(self, connection: socket.socket, server: web.Server, address: str) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            del self._beginning[task]
            if task.cancelled():
                connection.close()

        handler = server()
        task = asyncio.create_task(self._connect(connection, handler))
        self._beginning[task] = _Beginning(address, handler)
        task.add_done_callback(ended)

    async def _connect(self, connection: socket.socket, handler: web.RequestHandler) -> None:
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # A client that reads nothing of a response is disconnected as well.
            milliseconds = round(SILENCE_TIMEOUT * 1000)
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        timeout = TLS_TIMEOUT if self._ssl_context else None
        # The client may speak no TLS, have no certificate, take too long or disconnect.
        with suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: handler,
                connection,
                ssl=self._ssl_context,
                ssl_handshake_timeout=timeout,
                ssl_shutdown_timeout=timeout,
            )
