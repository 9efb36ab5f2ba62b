"""Bounds the bytes of answers to calls that wait for their readers, and refuses slow readers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from weakref import WeakValueDictionary

import structlog

from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.serving.budget import ByteBudget

MAX_ANSWER_BYTES = 32 << 20
"""Of all answers to calls that were made and not taken."""
MAX_ANSWER_BYTES_PER_ADDRESS = 16 << 20
"""The same, of one address."""
PLACE_TIMEOUT = 20.0
"""Seconds that the first of the answers of an address waits for a place."""


def log_slow_reader(reader: str, size: int) -> None:
    """Say in the log that a reader does not read.

    Args:
        reader: for people: a session's run, ranks and hosts, or a call and its caller.
        size: bytes that wait for it.
    """
    structlog.get_logger().warning("reader.slow", reader=reader, bytes=size)


def slow_reader(reader: str, held: str, size: int) -> Refusal:
    """Refuse a reader that does not read, and say so in the log.

    Args:
        reader: as above.
        held: what waited for it, for people.
        size: bytes of that.
    """
    log_slow_reader(reader, size)
    return Refusal(
        Reason.SLOW_CONSUMER, f"{held} were waiting for {reader} to read. Connect again and read what comes."
    )


class Answers:
    """Gives the large answers to calls their places in memory.

    Args:
        most: bytes of answers that are written or wait to be.
        most_of_one: the same, for an address.
    """

    def __init__(self, most: int = MAX_ANSWER_BYTES, most_of_one: int = MAX_ANSWER_BYTES_PER_ADDRESS) -> None:
        self._budget = ByteBudget(most, most_of_one)
        self._fewer = asyncio.Event()
        """Whether an answer has gone since those that wait for places have looked."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Held by the first answer of an address that waits for a place."""

    def has_place(self, size: int, address: str) -> bool:
        """Return whether the answer to a call may be in memory beside the others."""
        return self._budget.has_room(size, address)

    @asynccontextmanager
    async def place(
        self, size: int, address: str, reader: str, *, waits: bool = False
    ) -> AsyncIterator[None]:
        """Have the answer to a call in memory within this block.

        Args:
            size: its bytes.
            address: of the caller.
            reader: the caller, for people.
            waits: whether it waits for a place. If so, its bytes must not be in memory yet.

        Raises:
            Refusal: SLOW_CONSUMER, if there is no place.
        """
        if waits:
            await self._wait(size, address)
        if not self.has_place(size, address):
            held = self._budget.held(address)
            raise slow_reader(reader, f"answers of {held:,} bytes", held)
        try:
            with self._budget.hold(size, address):
                yield
        finally:
            self._fewer.set()

    async def _wait(self, size: int, address: str) -> None:
        """Wait until an answer has a place, in the order of those of the address, but not for ever."""
        async with self._turns.setdefault(address, asyncio.Lock()):
            with suppress(TimeoutError):
                async with asyncio.timeout(PLACE_TIMEOUT):
                    while not self.has_place(size, address):
                        self._fewer.clear()
                        await self._fewer.wait()
