"""What waits to be said on a stream of grpc.aio, and the task that says it."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

MAX_UNSENT = 1_000
"""Messages that may wait for a reader that does not read."""
MAX_UNSENT_BYTES = 33 << 20
"""Bytes of messages that may wait for a guest, as at the coordinator: the payloads of eight barriers."""


class Outbox:
    """Messages in order, until it is closed."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self.bytes = 0
        """Bytes of the messages that wait."""
        self._closed = False
        self._wake: asyncio.Future[None] | None = None
        self._fewer = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, data: bytes) -> None:
        """Say this next; once it is closed, nothing more is said."""
        if not self._closed:
            self._waiting.append(data)
            self.bytes += len(data)
            self._notify()

    def close(self) -> None:
        """Say no more than what waits already."""
        self._closed = True
        self._fewer.set()
        self._notify()

    def clear(self) -> None:
        """Do not say what waits."""
        self._waiting.clear()
        self.bytes = 0
        self._fewer.set()

    async def room(self, most: int) -> None:
        """Wait until fewer than so many messages wait, or none is taken any more."""
        while len(self._waiting) >= most and not self._closed:
            self._fewer.clear()
            await self._fewer.wait()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def write(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Say what comes, until it is closed and all is said."""
        loop = asyncio.get_running_loop()
        while True:
            while self._waiting:
                data = self._waiting.popleft()
                self.bytes -= len(data)
                self._fewer.set()
                await write(data)
            if self._closed:
                return
            self._wake = loop.create_future()
            await self._wake
