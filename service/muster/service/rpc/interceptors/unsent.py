"""Limits the memory for answers that wait for their readers, and refuses slow readers."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from weakref import WeakValueDictionary

import structlog

from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.serving.budget import ByteBudget

MAX_ANSWER_BYTES = 24 << 20
"""Size limit of all unread answers to calls."""
MAX_ANSWER_BYTES_PER_ADDRESS = 17 << 20
"""Size limit of the unread answers to one address: two of the largest, of a little more than 8 MiB. One is
written, and the other waits in ``muster.serving.writes``, which then ends the connection of a reader that
takes none."""
PLACE_TIMEOUT = 20.0
"""Seconds that the first waiting answer of an address waits for a place."""


def log_slow_reader(reader: str, size: int) -> None:
    """Log that a reader does not read.

    Args:
        reader: text for people: a session's run, ranks and hosts, or a call and its caller.
        size: unread bytes.
    """
    structlog.get_logger().warning("reader.slow", reader=reader, bytes=size)


def slow_reader(reader: str, held: str, size: int) -> Refusal:
    """Return the refusal of a reader that does not read, and log it.

    Args:
        reader: text for people, as above.
        held: a description of what is unread, for people.
        size: unread bytes.
    """
    log_slow_reader(reader, size)
    return Refusal(
        Reason.SLOW_CONSUMER, f"{held} were waiting for {reader} to read. Connect again and read what comes."
    )


class NoPlace(Exception):
    """A large answer has no place in memory beside other unread answers.

    Args:
        size: bytes of the answer.
    """

    def __init__(self, size: int) -> None:
        super().__init__(f"no place for an answer of {size:,} bytes")
        self.size = size


class Answers:
    """Admits large answers to calls to memory.

    Args:
        most: size limit of all unread answers, in bytes.
        most_of_one: the same, for one address.
    """

    def __init__(self, most: int = MAX_ANSWER_BYTES, most_of_one: int = MAX_ANSWER_BYTES_PER_ADDRESS) -> None:
        self._budget = ByteBudget(most, most_of_one)
        self._fewer = asyncio.Event()
        """Set when an answer has left memory since waiting answers last looked."""
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """The lock of the first waiting answer of each address."""

    def has_place(self, size: int, address: str) -> bool:
        """Return whether an answer may be in memory beside the others."""
        return self._budget.has_room(size, address)

    def check_place(self, size: int, address: str) -> None:
        """Check that an answer may be in memory beside the others.

        Raises:
            NoPlace: it would exceed a limit.
        """
        if not self.has_place(size, address):
            raise NoPlace(size)

    @contextmanager
    def place(self, size: int, address: str) -> Iterator[None]:
        """Reserve memory for an answer within this block.

        Args:
            size: bytes of the answer.
            address: the caller's address.

        Raises:
            NoPlace: it would exceed a limit.
        """
        self.check_place(size, address)
        try:
            with self._budget.hold(size, address):
                yield
        finally:
            self._fewer.set()

    async def until_place(self, size: int, address: str) -> bool:
        """Wait for a limited time until an answer has a place, in the order of the address's answers.

        Returns:
            Whether it has one. Reserve it before anything else is awaited.
        """
        async with self._turns.setdefault(address, asyncio.Lock()):
            with suppress(TimeoutError):
                async with asyncio.timeout(PLACE_TIMEOUT):
                    while not self.has_place(size, address):
                        self._fewer.clear()
                        await self._fewer.wait()
            return self.has_place(size, address)

    def refusal(self, address: str, reader: str) -> Refusal:
        """Return the refusal of an answer that has no place, and log it.

        Args:
            address: the caller's address.
            reader: the caller, for people.
        """
        held = self._budget.held(address)
        return slow_reader(reader, f"answers of {held:,} bytes", held)
