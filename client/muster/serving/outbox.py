"""Messages that wait to be written to a stream of grpc.aio, and the loop that writes them."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from muster.serving.queued import Queued

Take = Callable[[], bytes | None]
"""Takes the next message out of an outbox; None: the outbox was cleared meanwhile."""


class Outbox:
    """Messages in order, until it is closed.

    Args:
        queued: counts the messages of several outboxes; None: this one counts for itself.
    """

    __slots__ = ("_fewer", "_queued", "_waiting", "_wake", "bytes", "closed", "is_writing")

    def __init__(self, queued: Queued | None = None) -> None:
        self._queued = queued if queued is not None else Queued()
        self._waiting: deque[tuple[bytes, bytes]] = deque()
        """The part of each message that other outboxes may share, and the part that follows it here."""
        self.bytes = 0
        """Bytes of the messages that wait."""
        self.closed = False
        """Whether it accepts no more messages."""
        self.is_writing = False
        """Whether a message that was taken is being written, or its write has failed."""
        self._wake: asyncio.Future[None] | None = None
        self._fewer: asyncio.Event | None = None
        """Set when fewer messages wait; None before anything has waited for that."""

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, data: bytes, own: bytes = b"") -> None:
        """Add a message; a closed outbox drops it.

        Args:
            data: the part that other outboxes may share.
            own: the part that follows it here.
        """
        if not self.closed:
            self._waiting.append((data, own))
            self.bytes += len(data) + len(own)
            self._queued.add(data)
            self._notify()

    def take(self) -> bytes | None:
        """Remove and return the next message; None if none waits."""
        if not self._waiting:
            return None
        data, own = self._waiting.popleft()
        self.bytes -= len(data) + len(own)
        self._queued.remove(data)
        self.is_writing = True
        if self._fewer is not None:
            self._fewer.set()
        return data + own if own else data

    def close(self) -> None:
        """Accept no more messages; those that wait are still written."""
        self.closed = True
        if self._fewer is not None:
            self._fewer.set()
        self._notify()

    def clear(self) -> None:
        """Drop all messages that wait."""
        for data, _ in self._waiting:
            self._queued.remove(data)
        self._waiting.clear()
        self.bytes = 0
        if self._fewer is not None:
            self._fewer.set()

    async def room(self, limit: int) -> None:
        """Wait until fewer than ``limit`` messages wait, or until the outbox is closed."""
        while len(self._waiting) >= limit and not self.closed:
            self._fewer = self._fewer or asyncio.Event()
            self._fewer.clear()
            await self._fewer.wait()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def write(self, write: Callable[[int, Take], Awaitable[None]]) -> None:
        """Write messages until the outbox is closed and empty.

        Args:
            write: takes and writes the next message, given its size. A message counts until it is taken.
        """
        loop, waiting = asyncio.get_running_loop(), self._waiting
        while True:
            while waiting:
                data, own = waiting[0]
                size = len(data) + len(own)
                del data, own  # Only the outbox refers to them: a message is freed once it is written.
                await write(size, self.take)
                self.is_writing = False
            if self.closed:
                return
            self._wake = loop.create_future()
            await self._wake
