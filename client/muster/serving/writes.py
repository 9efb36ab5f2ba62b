"""Bounds the bytes of large messages that gRPC holds until their readers take them.

If a reader takes nothing, HTTP/2 stops the sender. gRPC then holds the message and a copy of it, can send no
status for that call, and frees both only when the connection ends. A reader with tiny windows and many calls
could fill the memory so.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

from muster.serving.budget import SMALL
from muster.serving.connections import address_of, end_connection

MAX_BYTES = 16 << 20
"""Bytes of the messages that are being written to all readers. They take twice that in memory."""
MAX_BYTES_PER_ADDRESS = 8 << 20
"""The same, for the readers at one address. It leaves room for others."""
MAX_ENDED = 1_000
"""Number of ended connections that are remembered."""
READER_TIMEOUT = 10.0
"""Seconds that a reader may take for a message while others need the room."""


class Call(Protocol):
    """A call's grpc.aio context, over raw bytes."""

    async def write(self, message: bytes, /) -> None:
        """Return once gRPC may take the next message."""
        ...

    def peer(self) -> str:
        """Return gRPC's name of the caller's connection."""
        ...


async def _nothing() -> None:
    """Write nothing: the message was withdrawn."""


@dataclass(slots=True)
class _Writing:
    size: int
    since: float
    peer: str
    address: str
    reader: Callable[[], str]
    ended: bool = False
    """Whether its connection has been ended."""


class Writes:
    """Writes large messages while there is room, and ends the connection of a reader that takes none.

    Args:
        slow: is called with the name of such a reader, and with the bytes that it has not taken.
        most: bytes. A larger message is written alone.
        most_of_one: bytes, of the readers at one address. A larger message is written alone there.
        end: ends the connection of a peer.
    """

    def __init__(
        self,
        slow: Callable[[str, int], None],
        most: int = MAX_BYTES,
        most_of_one: int = MAX_BYTES_PER_ADDRESS,
        end: Callable[[str], Awaitable[object]] = end_connection,
    ) -> None:
        self._slow = slow
        self._most = most
        self._most_of_one = most_of_one
        self.end = end
        """Ends the connection of a peer if a write to it does not end. No status would reach that peer."""
        self._ended: deque[str] = deque(maxlen=MAX_ENDED)
        """The peers that were disconnected last."""
        self._writing: dict[asyncio.Future[None], _Writing] = {}
        """In the order in which they began. A write stays here until gRPC has finished it, even if the call's
        handler has given it up."""
        self._bytes: Counter[str] = Counter()
        """Bytes of these messages, by address."""
        self._turn = asyncio.Lock()
        """Held while a message waits for room: later messages continue one by one, in their order."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """The same, for each address."""
        self._fewer = asyncio.Event()
        """Whether a write has ended since the waiting messages looked for room."""

    @property
    def held(self) -> int:
        """Bytes of the large messages that are being written."""
        return self._bytes.total()

    def has_ended(self, peer: str) -> bool:
        """Return whether the connection of a peer was ended because it takes no message."""
        return peer in self._ended

    def write(
        self, call: Call, size: int, make: Callable[[], bytes | None], reader: Callable[[], str]
    ) -> Awaitable[None]:
        """Return what writes a message to the caller of a call; await it at once.

        A small message is made at once, and costs no coroutine of its own here. A large one may wait for
        those before it.

        Args:
            call: the call.
            size: bytes of the message.
            make: returns the message once there is room for it; None if it was withdrawn.
            reader: returns the name of the reader, for people.
        """
        if size > SMALL:
            return self._write_large(call, size, make, reader)
        data = make()
        return call.write(data) if data is not None else _nothing()

    async def _write_large(
        self, call: Call, size: int, make: Callable[[], bytes | None], reader: Callable[[], str]
    ) -> None:
        peer = call.peer()
        address = address_of(peer)
        async with self._turns.setdefault(address, asyncio.Lock()):
            await self._until_fits(size, self._most_of_one, address)
            async with self._turn:
                await self._until_fits(size, self._most)
                if (data := make()) is None:
                    return
                write = asyncio.ensure_future(call.write(data))
                data = None  # Only the write refers to it from here on.
                now = asyncio.get_running_loop().time()
                self._writing[write] = _Writing(size, now, peer, address, reader)
                self._bytes[address] += size
                write.add_done_callback(self._done)
        await asyncio.shield(write)

    def _done(self, write: asyncio.Future[None]) -> None:
        writing = self._writing.pop(write)
        self._bytes[writing.address] -= writing.size
        if not self._bytes[writing.address]:
            del self._bytes[writing.address]
        self._fewer.set()
        if not write.cancelled():
            write.exception()  # The handler raises it, unless it has given up.

    async def _until_fits(self, size: int, most: int, address: str | None = None) -> None:
        """Wait until there is room among the writes to an address, or to all; end the slowest meanwhile."""
        loop = asyncio.get_running_loop()
        while held := self._bytes.total() if address is None else self._bytes[address]:
            if held + size <= most:
                return
            oldest = self._oldest(address)
            left = None if oldest is None else oldest.since + READER_TIMEOUT - loop.time()
            self._fewer.clear()
            if oldest is not None and left is not None and left <= 0:
                oldest.ended = True
                self._ended.append(oldest.peer)
                self._slow(oldest.reader(), oldest.size)
                await self.end(oldest.peer)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._fewer.wait()

    def _oldest(self, address: str | None) -> _Writing | None:
        """Return the oldest write whose connection has not been ended."""
        return next(
            (one for one in self._writing.values() if not one.ended and address in (None, one.address)), None
        )
