"""Messages that wait to be written to a stream of grpc.aio, and the loop that writes them."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from muster.serving.budget import SMALL
from muster.serving.queued import Queued

Take = Callable[[], bytes | None]
"""Takes the next message out of an outbox; None: the outbox was cleared meanwhile."""


WakeUp = Callable[[asyncio.Future[None]], None]
"""Wakes a loop that writes, by setting the future that it waits for."""


def wake_now(writer: asyncio.Future[None]) -> None:
    """Wake a loop that writes, unless it was cancelled."""
    if not writer.done():
        writer.set_result(None)


class Outbox:
    """Messages in order, until it is closed.

    Args:
        queued: counts the messages of several outboxes; None: this one counts for itself.
    """

    __slots__ = ("_fewer", "_queued", "_writer", "bytes", "closed", "is_writing", "waiting", "wake_up")

    def __init__(self, queued: Queued | None = None) -> None:
        self._queued = queued if queued is not None else Queued()
        self.waiting: deque[tuple[bytes, bytes, int]] = deque()
        """For each message: the part that other outboxes may share, the part that follows, and its size."""
        self.bytes = 0
        """Bytes of the messages that wait."""
        self.closed = False
        """Whether it accepts no more messages."""
        self.is_writing = False
        """Whether a message that was taken is being written, or its write has failed."""
        self.wake_up: WakeUp = wake_now
        """How the loop that writes is woken."""
        self._writer: asyncio.Future[None] | None = None
        """What the loop that writes waits for; None: it writes, or was woken."""
        self._fewer: asyncio.Event | None = None
        """Set when fewer messages wait; None before anything has waited for that."""

    def __len__(self) -> int:
        return len(self.waiting)

    def put(self, data: bytes, own: bytes = b"") -> None:
        """Add a message; a closed outbox drops it.

        Args:
            data: the part that other outboxes may share.
            own: the part that follows it here.
        """
        if not self.closed:
            size = len(data) + len(own)
            self.waiting.append((data, own, size))
            self.bytes += size
            if size > SMALL:
                self._queued.add(data)
            self._notify()

    def take(self) -> bytes | None:
        """Remove and return the next message; None if none waits."""
        if not self.waiting:
            return None
        data, own, size = self.waiting.popleft()
        self.bytes -= size
        if size > SMALL:
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
        for data, _, _ in self.waiting:
            self._queued.remove(data)
        self.waiting.clear()
        self.bytes = 0
        if self._fewer is not None:
            self._fewer.set()

    async def room(self, limit: int) -> None:
        """Wait until fewer than ``limit`` messages wait, or until the outbox is closed."""
        while len(self.waiting) >= limit and not self.closed:
            self._fewer = self._fewer or asyncio.Event()
            self._fewer.clear()
            await self._fewer.wait()

    def _notify(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            self.wake_up(writer)

    async def write(self, write: Callable[[int, Take], Awaitable[None]]) -> None:
        """Write messages until the outbox is closed and empty.

        Args:
            write: takes and writes the next message, given its size. A message counts until it is taken.
        """
        loop, waiting = asyncio.get_running_loop(), self.waiting
        while True:
            while waiting:
                await write(waiting[0][2], self.take)
                self.is_writing = False
            if self.closed:
                return
            self._writer = writer = loop.create_future()
            await writer
