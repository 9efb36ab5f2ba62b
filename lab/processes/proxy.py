"""A TCP proxy that can delay, cut, refuse, swallow and hold: a bad network on one machine."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from lab.patience import PATIENCE


class Proxy:
    """Carries bytes between clients and one port, as badly as it is told.

    Args:
        port: the port of the real server on this machine; or a function that names one for each connection.
        source: the address of this machine that the server sees.
    """

    def __init__(self, port: int | Callable[[], int], source: str = "127.0.0.1") -> None:
        self._target = port if callable(port) else lambda: port
        self._source = source
        self._delay = 0.0
        self._swallow = False
        self._refuse = False
        self.refused = 0
        """How many connections it has refused."""
        self._held: dict[asyncio.StreamWriter, list[bytes]] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.endpoint = ""

    def __enter__(self) -> "Proxy":
        self._thread.start()
        server = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self._server = server
        self.endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def delay(self, seconds: float) -> None:
        """Hold every chunk of bytes back for so long."""
        self._delay = seconds

    def black_hole(self) -> None:
        """Take bytes and pass none on, without closing anything."""
        self._swallow = True

    def hold(self) -> None:
        """Keep what clients say from now on; what they say after a :meth:`black_hole` is lost as usual."""
        self._held = {}

    @property
    def holds(self) -> bool:
        """Whether any client has said something since :meth:`hold`."""
        return bool(self._held)

    def deliver(self) -> int:
        """Let go what was held, also of clients that are gone; how many bytes the server got."""
        delivered: int = self._do(self._deliver())
        return delivered

    async def _deliver(self) -> int:
        held, self._held = self._held or {}, None
        delivered = 0
        for sink, chunks in held.items():
            with suppress(OSError):  # The server has closed this one meanwhile.
                sink.writelines(chunks)
                await sink.drain()
                delivered += sum(map(len, chunks))
        return delivered

    def cut(self, *, refuse: bool = False) -> None:
        """Reset every connection; with ``refuse`` also every new one, until the next :meth:`heal`."""
        self._refuse = refuse
        self._do(self._reset())

    def heal(self) -> None:
        """Be a good network again."""
        self._delay, self._swallow, self._refuse, self._held = 0.0, False, False, None

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=PATIENCE)

    async def _reset(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _close(self) -> None:
        self._server.close()
        await self._reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuse:
            self.refused += 1
            writer.transport.abort()
            return
        try:
            upstream = await asyncio.open_connection(
                "127.0.0.1", self._target(), local_addr=(self._source, 0)
            )
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, upstream[1]}
        for source, sink in ((reader, upstream[1]), (upstream[0], writer)):
            task = asyncio.ensure_future(self._pump(source, sink, says=source is reader))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, says: bool) -> None:
        try:
            while data := await source.read(65536):
                await asyncio.sleep(self._delay)
                if self._swallow:
                    continue
                if says and self._held is not None:
                    self._held.setdefault(sink, []).append(data)
                    continue
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            # The server is not to hear that a client has gone before it hears what the client said.
            if self._held is None or sink not in self._held:
                sink.close()
                self._writers.discard(sink)
