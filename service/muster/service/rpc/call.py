"""A unary call as a session of the driver that waits for one answer."""

import asyncio
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Generic, TypeVar

from muster.service.core.vocabulary.effects import NO_RANKS, Message, Refused
from muster.service.core.vocabulary.events import Disconnected
from muster.service.core.vocabulary.refusal import Refusal
from muster.service.draining import DRAINING
from muster.service.driver import Driver, Outgoing

T = TypeVar("T")


class Call(Generic[T]):
    """A call inside a ``with`` block. Its answer is the first message of a kind, or the first refusal.

    Args:
        driver: takes the events, which name the call by its ``id``.
        kind: the class of the awaited message.
    """

    def __init__(self, driver: Driver, kind: type[T]) -> None:
        self._driver = driver
        self._kind = kind
        self._answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.id = driver.connect(self)

    def __enter__(self) -> "Call[T]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._answer.cancel()
        self._driver.disconnect(self.id)
        self._driver.submit(Disconnected(self.id))

    def deliver(self, outgoing: Outgoing, ranks: AbstractSet[int] = NO_RANKS) -> None:
        """Take a message, and drop it unless it is of the awaited kind or a refusal."""
        message: Message = outgoing.message
        if isinstance(message, self._kind):
            if not self._answer.done():
                self._answer.set_result(message)
        elif isinstance(message, Refused):
            self.refuse(message.refusal)

    def refuse(self, refusal: Refusal) -> None:
        """End the wait with a refusal."""
        if not self._answer.done():
            self._answer.set_exception(refusal)

    async def answer(self) -> T:
        """Wait for the answer.

        Raises:
            Refusal: the core refused the call.
        """
        return await self._answer


class LongPolls:
    """The waiting calls of a service. A drain ends them.

    Args:
        driver: takes their events.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._open: set[Call[Any]] = set()
        self._draining = False

    @contextmanager
    def open(self, kind: type[T]) -> Iterator[Call[T]]:
        """Open a call that a drain ends.

        Raises:
            Refusal: COORDINATOR_DRAINING.
        """
        if self._draining:
            raise DRAINING
        with Call(self._driver, kind) as call:
            self._open.add(call)
            try:
                yield call
            finally:
                self._open.discard(call)

    def drain(self) -> None:
        """End every call and refuse new ones. The callers ask again."""
        self._draining = True
        for call in list(self._open):
            call.refuse(DRAINING)
