"""Wakes the tasks that wait for a change."""

import asyncio
from collections.abc import Callable


class Bell:
    """A change that several tasks of one event loop may wait for."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Wake all that wait."""
        rung, self._rung = self._rung, asyncio.Event()
        rung.set()

    def next(self) -> asyncio.Event:
        """Return what is set at the next ring. Take it before you look, so that no change is missed."""
        return self._rung

    async def until(self, happened: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until something has happened; look whenever the bell rings.

        Args:
            happened: looks.
            seconds: how long to wait; None: without end.

        Returns:
            Whether it has.
        """
        try:
            async with asyncio.timeout(seconds):
                while not happened():
                    await self._rung.wait()
        except TimeoutError:
            return happened()
        return True
