"""The answers of a call that gets messages by push, for as long as it lasts."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from collections.abc import Set as AbstractSet

from muster.service.core.vocabulary.effects import NO_RANKS, Message, Refused
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.driver import Driver, Outgoing

MAX_UNSENT = 100
"""Messages that may wait for a caller that does not read."""


class PushStream:
    """The stream of a node or a keeper: an iterator over the messages that the driver delivers.

    Args:
        driver: delivers the messages.
    """

    def __init__(self, driver: Driver) -> None:
        self._outbox: deque[Message] = deque()
        self._wake = asyncio.Event()
        self._ended: Refusal | None = None
        self.id = driver.connect(self)

    def deliver(self, outgoing: Outgoing, ranks: AbstractSet[int] = NO_RANKS) -> None:
        """Queue a message. A refusal ends the stream after the messages before it."""
        message = outgoing.message
        if isinstance(message, Refused):
            self.end(message.refusal)
        elif len(self._outbox) >= MAX_UNSENT:
            self.end(
                Refusal(
                    Reason.SLOW_CONSUMER,
                    f"{MAX_UNSENT} messages were waiting for this caller to read them. Call again and read.",
                )
            )
        else:
            self._outbox.append(message)
            self._wake.set()

    @property
    def ended(self) -> bool:
        """Whether the coordinator has ended the stream."""
        return self._ended is not None

    def end(self, refusal: Refusal) -> None:
        """End the stream with a refusal, after the queued messages."""
        self._ended = self._ended or refusal
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            while self._outbox:
                yield self._outbox.popleft()
            if self._ended is not None:
                raise self._ended
            self._wake.clear()
            await self._wake.wait()
