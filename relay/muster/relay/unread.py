"""Bounds the answers that callers of a relay do not read: each is in the relay's memory until then."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from muster.relay import refusals

SMALL = 16_384
"""Bytes of an answer that is not counted."""
MAX_BYTES = 96 << 20
"""Of all answers that are not read."""
MAX_BYTES_PER_ADDRESS = 64 << 20
"""The same, of one address: it leaves room for others."""


class Unread:
    """Counts the bytes of answers on their way to callers.

    Args:
        most: bytes, of all callers.
        most_of_one: bytes, of the callers at one address.
    """

    def __init__(self, most: int = MAX_BYTES, most_of_one: int = MAX_BYTES_PER_ADDRESS) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._held: Counter[str] = Counter()

    @contextmanager
    def answer(self, size: int, peer: str) -> Iterator[None]:
        """Write an answer within this block; one alone may have any size.

        Args:
            size: its bytes.
            peer: gRPC's name of its reader.

        Raises:
            Refused: SLOW_CONSUMER.
        """
        if size <= SMALL:
            yield
            return
        address = peer.rpartition(":")[0]
        held = self._held[address]
        if held and (held + size > self._most_of_one or self._held.total() + size > self._most):
            raise refusals.unread(held)
        self._held[address] += size
        try:
            yield
        finally:
            self._held[address] -= size
            if not self._held[address]:
                del self._held[address]
