"""Bounds the bytes of messages that wait in the outboxes of all streams."""

from collections import Counter

from muster.serving.budget import SMALL

MAX_BYTES = 64 << 20
"""Bytes in all outboxes. A message for many streams is in memory once, and counts once."""


class Queued:
    """Counts the bytes of large messages in the outboxes of all streams.

    Args:
        most: bytes.
    """

    def __init__(self, most: int = MAX_BYTES) -> None:
        self._most = most
        self._users: Counter[int] = Counter()
        """By the identity of a message; an outbox keeps it in memory."""
        self.bytes = 0

    @property
    def too_many(self) -> bool:
        """Whether a reader must be cut off."""
        return self.bytes > self._most

    def add(self, data: bytes) -> None:
        """Count a message that was put into an outbox."""
        if len(data) > SMALL:
            if not self._users[id(data)]:
                self.bytes += len(data)
            self._users[id(data)] += 1

    def remove(self, data: bytes) -> None:
        """Count a message that was taken out of an outbox; call it while the message is in memory."""
        if len(data) > SMALL:
            self._users[id(data)] -= 1
            if not self._users[id(data)]:
                del self._users[id(data)]
                self.bytes -= len(data)
