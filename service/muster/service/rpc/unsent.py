"""Bounds the bytes that wait for their readers: in the outboxes of sessions, and within gRPC.

HTTP/2 stops the sender of a message whose reader takes nothing, and gRPC holds a copy of it until then.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import structlog

from muster.service.core.refusal import Reason, Refusal

SMALL = 16_384
"""Bytes of a message that is not counted. A session's outbox is bounded by the number of those."""
MAX_QUEUED_BYTES = 128 << 20
"""In the outboxes of all sessions. A message for many sessions is in memory once, and counts once."""
MAX_IN_FLIGHT_BYTES = 64 << 20
"""Within gRPC, of messages on their way to all readers."""
MAX_ANSWER_BYTES = 128 << 20
"""Of all answers to calls that were made and not taken."""
MAX_ANSWER_BYTES_PER_ADDRESS = 96 << 20
"""The same, of one address."""
PATIENCE = 10.0
"""Seconds that a reader may take for a message while others need the room."""
PLACE_TIMEOUT = 2 * PATIENCE
"""Seconds that the first of the answers of an address waits for a place."""


def slow_reader(reader: str, held: str) -> Refusal:
    """Refuse a reader that does not read, and say so in the log.

    Args:
        reader: for people: a session's run, ranks and hosts, or a call and its caller.
        held: what waited for it.
    """
    structlog.get_logger().warning("reader.slow", reader=reader, held=held)
    return Refusal(
        Reason.SLOW_CONSUMER, f"{held} were waiting for {reader} to read. Connect again and read what comes."
    )


class Queued:
    """Counts the bytes of large messages in the outboxes of all sessions.

    Args:
        most: bytes.
    """

    def __init__(self, most: int = MAX_QUEUED_BYTES) -> None:
        self._most = most
        self._users: Counter[int] = Counter()
        """By the identity of a message, which some outbox keeps in memory."""
        self.bytes = 0

    @property
    def too_many(self) -> bool:
        """Whether somebody must be cut off."""
        return self.bytes > self._most

    def add(self, data: bytes) -> None:
        """A message is in one more outbox."""
        if len(data) > SMALL:
            if not self._users[id(data)]:
                self.bytes += len(data)
            self._users[id(data)] += 1

    def remove(self, data: bytes) -> None:
        """A message is in one outbox less; call it while the message is still in memory."""
        if len(data) > SMALL:
            self._users[id(data)] -= 1
            if not self._users[id(data)]:
                del self._users[id(data)]
                self.bytes -= len(data)


@dataclass(slots=True, eq=False)
class _Writing:
    size: int
    since: float
    patience: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))


class InFlight:
    """Lets large messages be written while there is room, and cuts off a reader that takes none.

    Args:
        most: bytes; a larger message is written alone.
        most_answers: bytes of answers that are written or wait to be.
        most_answers_of_one: the same, for an address.
    """

    def __init__(
        self,
        most: int = MAX_IN_FLIGHT_BYTES,
        most_answers: int = MAX_ANSWER_BYTES,
        most_answers_of_one: int = MAX_ANSWER_BYTES_PER_ADDRESS,
    ) -> None:
        self._most = most
        self._most_answers = most_answers
        self._most_answers_of_one = most_answers_of_one
        self._writing: dict[_Writing, None] = {}
        """In the order in which they began."""
        self._bytes = 0
        self._turn = asyncio.Lock()
        """Held while a message waits for room: those behind it are woken one by one, in their order."""
        self._fewer = asyncio.Event()
        """Whether a message was written since the one that waits for room has looked."""
        self._answers: Counter[str] = Counter()
        self._fewer_answers = asyncio.Event()
        self._lines: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Held by the first answer of an address that waits for a place."""

    @asynccontextmanager
    async def answer(
        self, size: int, address: str, reader: str, *, waits: bool = False
    ) -> AsyncIterator[None]:
        """Write the answer to a call within this block.

        Args:
            size: its bytes.
            address: of the caller.
            reader: the caller, for people.
            waits: whether it waits for a place. If so, its bytes must not be in memory yet.

        Raises:
            Refusal: SLOW_CONSUMER, if there is no place.
        """
        if waits:
            await self._place(size, address)
        if not self.has_place(size, address):
            raise slow_reader(reader, f"answers of {self._answers[address]:,} bytes")
        self._answers[address] += size
        try:
            async with self.message(size, lambda: reader):
                yield
        finally:
            self._answers[address] -= size
            if not self._answers[address]:
                del self._answers[address]
            self._fewer_answers.set()

    def has_place(self, size: int, address: str) -> bool:
        """Whether the answer to a call may be in memory beside the others. Who holds none may have one."""
        held = self._answers[address]
        total = self._answers.total()
        return not held or (held + size <= self._most_answers_of_one and total + size <= self._most_answers)

    async def _place(self, size: int, address: str) -> None:
        """Wait until an answer has a place, in the order of those of the address, but not for ever."""
        line = self._lines.setdefault(address, asyncio.Lock())
        async with line:
            with suppress(TimeoutError):
                async with asyncio.timeout(PLACE_TIMEOUT):
                    while not self.has_place(size, address):
                        self._fewer_answers.clear()
                        await self._fewer_answers.wait()

    @asynccontextmanager
    async def message(self, size: int, reader: Callable[[], str]) -> AsyncIterator[None]:
        """Write a message within this block; it may wait for those before it.

        Args:
            size: its bytes.
            reader: names who reads it, for people.

        Raises:
            Refusal: SLOW_CONSUMER, if others needed the room for too long.
        """
        async with self._turn:
            await self._room(size)
            writing = _Writing(size, asyncio.get_running_loop().time())
            self._writing[writing] = None
            self._bytes += size
        try:
            async with writing.patience:
                yield
        except TimeoutError:
            if not writing.patience.expired():
                raise
            raise slow_reader(reader(), f"a message of {size:,} bytes") from None
        finally:
            del self._writing[writing]
            self._bytes -= size
            self._fewer.set()

    async def _room(self, size: int) -> None:
        loop = asyncio.get_running_loop()
        while self._writing and self._bytes + size > self._most:
            oldest = next(iter(self._writing))
            left = oldest.since + PATIENCE - loop.time()
            if left <= 0 and oldest.patience.when() is None:
                oldest.patience.reschedule(0)
            self._fewer.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left if left > 0 else None):
                    await self._fewer.wait()
