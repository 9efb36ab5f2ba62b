"""A bound on the connections of the HTTP port, and on how long each may be silent."""

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
"""Open at once, those that TLS begins on among them. With TLS, asyncio allocates 256 KiB for each."""
LET_GO_AT_ONCE = 16
"""How many make room when there are as many as may be, so that it is rarely looked who."""
FULL_PAUSE = 0.001
"""Seconds until the next is taken then, so that those who come again and again do not keep others waiting."""
SILENCE_TIMEOUT = 10.0
"""Seconds until a request must be whole, from the connection's begin or the answer before it."""
TLS_TIMEOUT = 10.0
"""Seconds that TLS may take to begin, and to end."""
ACCEPT_PAUSE = 1.0
"""Seconds until it is tried again to take connections, when the system has no room for one."""


class _Beginning(NamedTuple):
    """A connection that was taken."""

    address: str
    handler: web.RequestHandler

    @property
    def made(self) -> bool:
        """Whether it is among the server's."""
        return self.handler.transport is not None


class BoundedSite(web.BaseSite):
    """A TCP address that takes so many connections at once.

    When there are as many, those make room who came first from the address that has most: a probe, which asks
    and is gone, is answered however many others hold their connections and say nothing.

    Connections are counted from the moment that they are taken: asyncio's own server shows them only once
    TLS has begun, and a client that says nothing may hold as many files as it likes until then.

    Args:
        runner: serves them; it must have been set up.
        host: where to listen.
        port: 0 for any.
        ssl_context: for TLS.
        max_connections: open at once.
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
        """Where it listens."""
        return f"{'https' if self._ssl_context else 'http'}://{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address cannot be bound.
        """
        await super().start()
        server = self._runner.server
        assert server is not None
        # It binds every address of the host; connections are taken below.
        bind = functools.partial(asyncio.get_running_loop().create_server, server, start_serving=False)
        if self._host == "::" and socket.has_dualstack_ipv6():
            # As gRPC does: IPv4 as well, which asyncio leaves out.
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
        """Take no more, and let go of those that TLS still begins on."""
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
                continue  # It was gone before it was taken.
            except OSError as error:
                structlog.get_logger().warning("http.accept_failed", error=str(error))
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            self._begin(connection, server, peer[0])
            beginning = sum(not one.made for one in self._beginning.values())
            if beginning + len(server.connections) > self._max_connections:
                self._make_room(server)
                await asyncio.sleep(FULL_PAUSE)
            await asyncio.sleep(0)  # Others have their turn between any two.

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
        for let_go in most[: max(1, min(LET_GO_AT_ONCE, len(most) // 2))]:
            let_go()

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
            # Who takes none of an answer is let go as well.
            milliseconds = round(SILENCE_TIMEOUT * 1000)
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        timeout = TLS_TIMEOUT if self._ssl_context else None
        # It may speak no TLS, have no certificate, take too long or go away.
        with suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: handler,
                connection,
                ssl=self._ssl_context,
                ssl_handshake_timeout=timeout,
                ssl_shutdown_timeout=timeout,
            )
