"""A bound on bytes in memory, with a share of it for each owner."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from muster.serving.counted import counted

SMALL = 16_384
"""Bytes of a message that no budget counts; the number of small messages is bounded instead."""


class ByteBudget:
    """Counts the bytes that each owner holds.

    Args:
        most: bytes, of all owners.
        most_of_one: bytes, of one owner. It leaves room for others.
    """

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._held: Counter[str] = Counter()

    def held(self, owner: str) -> int:
        """Return the bytes that an owner holds."""
        return self._held[owner]

    def has_room(self, size: int, owner: str) -> bool:
        """Return whether an owner may hold so many more bytes; the first message may have any size."""
        held = self._held[owner]
        return not held or (held + size <= self._most_of_one and self._held.total() + size <= self._most)

    @contextmanager
    def hold(self, size: int, owner: str) -> Iterator[None]:
        """Count bytes for as long as the block runs."""
        with counted(self._held, owner, size):
            yield
