"""The answers of a call that gets messages by push, for as long as it lasts."""

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Set as AbstractSet

from muster.service.core.vocabulary.effects import NO_RANKS, Message, Refused
from muster.service.core.vocabulary.refusal import Refusal
from muster.service.driver import Driver, Outgoing


class PushStream:
    """The stream of a node or a keeper: an iterator over the messages that the driver delivers.

    Each message is a whole state: a standing, the peers, all orders. A later one of its type replaces it, so
    that a caller that does not read holds up one message of each type and no more.

    Args:
        driver: delivers the messages.
    """

    def __init__(self, driver: Driver) -> None:
        self._outbox: dict[type[Message], Message] = {}
        """The newest message of each type, in the order of their delivery."""
        self._wake = asyncio.Event()
        self._ended: Refusal | None = None
        self.id = driver.connect(self)

    def deliver(self, outgoing: Outgoing, ranks: AbstractSet[int] = NO_RANKS) -> None:
        """Queue a message. A refusal ends the stream after the messages before it."""
        message = outgoing.message
        if isinstance(message, Refused):
            self.end(message.refusal)
        else:
            self._outbox.pop(type(message), None)
            self._outbox[type(message)] = message
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
                yield self._outbox.pop(next(iter(self._outbox)))
            if self._ended is not None:
                raise self._ended
            self._wake.clear()
            await self._wake.wait()
