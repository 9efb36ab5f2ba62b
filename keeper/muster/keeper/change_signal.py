"""Wakes the tasks that wait for a change."""

import asyncio
from collections.abc import Callable


class ChangeSignal:
    """Tells several tasks of one event loop that something has changed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake all tasks that wait."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    def next(self) -> asyncio.Event:
        """Return the event of the next change. Take it before you look at the state: none is missed then."""
        return self._event

    async def until(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until a condition holds. It is checked now, and after each change.

        Args:
            condition: the condition.
            seconds: the longest time to wait; None: no limit.

        Returns:
            Whether the condition holds.
        """
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    await self._event.wait()
        except TimeoutError:
            return condition()
        return True
