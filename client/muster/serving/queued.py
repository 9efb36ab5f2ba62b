"""Bounds the bytes of messages that wait in the outboxes of all streams."""

from collections import Counter

from muster.serving.budget import SMALL

MAX_BYTES = 64 << 20
"""In all outboxes. A message for many streams is in memory once, and counts once."""


class Queued:
    """Counts the bytes of large messages in the outboxes of all streams.

    Args:
        most: bytes.
    """

    def __init__(self, most: int = MAX_BYTES) -> None:
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
