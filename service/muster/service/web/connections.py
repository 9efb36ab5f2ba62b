"""A bound on the connections of the HTTP port, and on how long each may be silent."""

import asyncio
import socket
import ssl
from collections.abc import Coroutine
from contextlib import suppress

import structlog
from aiohttp import web

MAX_CONNECTIONS = 1_000
"""Open at once, those that TLS begins on among them; who comes beyond is let go."""
SILENCE_TIMEOUT = 10.0
"""Seconds until a request must be whole, from the connection's begin or the answer before it."""
TLS_TIMEOUT = 10.0
"""Seconds that TLS may take to begin, and to end."""
ACCEPT_PAUSE = 1.0
"""Seconds until it is tried again to take connections, when the system has no room for one."""


class BoundedSite(web.BaseSite):
    """A TCP address that takes so many connections at once.

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
        self._tasks: set[asyncio.Task[None]] = set()
        self._beginning: set[socket.socket] = set()
        """Taken, and not yet among the runner's."""

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
        loop = asyncio.get_running_loop()
        bound = await loop.create_server(server, self._host, self._port, start_serving=False)
        self._server = bound
        for address in bound.sockets:
            listening = address.dup()
            listening.setblocking(False)
            listening.listen(self._backlog)
            self._listening.append(listening)
            self._run(self._take(listening, server))

    async def stop(self) -> None:
        """Take no more, and let go of those that TLS still begins on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for taken in (*self._listening, *self._beginning):
            taken.close()
        await super().stop()

    async def _take(self, listening: socket.socket, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except ConnectionError:
                continue  # It was gone before it was taken.
            except OSError as error:
                structlog.get_logger().warning("http.accept_failed", error=str(error))
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            if len(self._beginning) + len(server.connections) < self._max_connections:
                self._beginning.add(connection)
                self._run(self._begin(connection, server))
            else:
                connection.close()
            await asyncio.sleep(0)  # Others have their turn between any two.

    async def _begin(self, connection: socket.socket, server: web.Server) -> None:
        timeout = TLS_TIMEOUT if self._ssl_context else None
        # It may speak no TLS, have no certificate, take too long or go away.
        with suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                server,
                connection,
                ssl=self._ssl_context,
                ssl_handshake_timeout=timeout,
                ssl_shutdown_timeout=timeout,
            )
        self._beginning.discard(connection)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
