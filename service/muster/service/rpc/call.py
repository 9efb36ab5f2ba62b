"""A unary call as a session of the driver: the first answer of the kind that it waits for ends it."""

import asyncio
from typing import Generic, TypeVar

from muster.service.core.effects import Message, Refused
from muster.service.core.events import Disconnected
from muster.service.core.refusal import Refusal
from muster.service.driver import Driver, Outgoing

T = TypeVar("T")


class Call(Generic[T]):
    """One call that waits for one answer.

    Args:
        driver: whom it is submitted to.
        kind: the type of the answer; other messages are of no interest to a call.
    """

    def __init__(self, driver: Driver, kind: type[T]) -> None:
        self._driver = driver
        self._kind = kind
        self._answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.id = driver.connect(self)

    def deliver(self, outgoing: Outgoing) -> None:
        """Take a message."""
        message: Message = outgoing.message
        if self._answer.done():
            return
        if isinstance(message, self._kind):
            self._answer.set_result(message)
        elif isinstance(message, Refused):
            self._answer.set_exception(message.refusal)

    def refuse(self, refusal: Refusal) -> None:
        """End the wait."""
        if not self._answer.done():
            self._answer.set_exception(refusal)

    async def answer(self) -> T:
        """Wait for the answer.

        Raises:
            Refusal: there is none.
        """
        try:
            return await self._answer
        finally:
            self._driver.disconnect(self.id)
            self._driver.submit(Disconnected(self.id))
