"""A bound on the connections of the HTTP port, and on how long each may be silent."""

import asyncio
import ssl

from aiohttp import web

MAX_CONNECTIONS = 1_000
"""Open at once; those who come beyond are let go."""
SILENCE_TIMEOUT = 10.0
"""Seconds until a request must be whole, from the connection's begin or the answer before it."""
HANDSHAKE_TIMEOUT = 10.0
"""Seconds that TLS may take."""


class BoundedSite(web.BaseSite):
    """A TCP address that takes so many connections at once.

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

        def connection() -> asyncio.Protocol:
            return server() if len(server.connections) < self._max_connections else _LetGo()

        self._server = await asyncio.get_running_loop().create_server(
            connection,
            self._host,
            self._port,
            ssl=self._ssl_context,
            ssl_handshake_timeout=HANDSHAKE_TIMEOUT if self._ssl_context else None,
        )


class _LetGo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()
