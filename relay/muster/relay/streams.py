"""What waits to be said on a stream of grpc.aio, and the task that says it."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from muster.serving.queued import Queued

MAX_UNSENT = 1_000
"""Messages that may wait for a reader that does not read."""
MAX_UNSENT_BYTES = 33 << 20
"""Bytes of messages that may wait for a guest, as at the coordinator: the payloads of eight barriers."""


Take = Callable[[], bytes | None]
"""Takes the next message out of an outbox; None: the outbox was cleared meanwhile."""


class Outbox:
    """Messages in order, until it is closed.

    Args:
        queued: counts the messages of several outboxes; None: nobody asks.
    """

    def __init__(self, queued: Queued | None = None) -> None:
        self._queued = queued if queued is not None else Queued()
        self._waiting: deque[tuple[bytes, bytes]] = deque()
        """The part of each message that other outboxes may share, and the part that follows it here."""
        self.bytes = 0
        """Bytes of the messages that wait."""
        self._closed = False
        self._wake: asyncio.Future[None] | None = None
        self._fewer = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, data: bytes, own: bytes = b"") -> None:
        """Add a message; a closed outbox drops it.

        Args:
            data: the part that other outboxes may share.
            own: the part that follows it here.
        """
        if not self._closed:
            self._waiting.append((data, own))
            self.bytes += len(data) + len(own)
            self._queued.add(data)
            self._notify()

    def _take(self) -> bytes | None:
        if not self._waiting:
            return None
        data, own = self._waiting.popleft()
        self.bytes -= len(data) + len(own)
        self._queued.remove(data)
        self._fewer.set()
        return data + own if own else data

    def close(self) -> None:
        """Say no more than what waits already."""
        self._closed = True
        self._fewer.set()
        self._notify()

    def clear(self) -> None:
        """Do not say what waits."""
        while self._waiting:
            self._take()
        self._fewer.set()

    async def room(self, most: int) -> None:
        """Wait until fewer than so many messages wait, or none is taken any more."""
        while len(self._waiting) >= most and not self._closed:
            self._fewer.clear()
            await self._fewer.wait()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def write(self, write: Callable[[int, Take], Awaitable[None]]) -> None:
        """Say what comes, until it is closed and all is said.

        Args:
            write: takes and writes the next message, given its size. A message counts until it is taken.
        """
        loop = asyncio.get_running_loop()
        while True:
            while self._waiting:
                await write(sum(map(len, self._waiting[0])), self._take)
            if self._closed:
                return
            self._wake = loop.create_future()
            await self._wake
