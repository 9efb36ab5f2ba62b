"""A source that the watcher polls, such as a metadata server."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from muster.watcher.notice import Notice
from muster.watcher.source import Report

logger = logging.getLogger(__name__)


class LookError(Exception):
    """One look at a source failed. The message says why, for people."""


class Polled:
    """A source that polls. If a look fails, the notices of the look before stay in force.

    Args:
        name: as in ``muster watch --source NAME``.
        look: returns the notices in force, or raises ``LookError``.
        interval: seconds between two looks.
        pause: waits for so many seconds.
    """

    def __init__(
        self,
        name: str,
        look: Callable[[], Awaitable[list[Notice]]],
        interval: float,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.name = name
        self._look = look
        self._interval = interval
        self._pause = pause

    async def watch(self, report: Report) -> None:
        """See ``Source``."""
        fault = Fault(self.name)
        while True:
            try:
                notices = await self._look()
            except LookError as error:
                fault.happened(str(error))
            else:
                fault.over()
                report(notices)
            await self._pause(self._interval)


class Fault:
    """Logs a failure that repeats: at first, when its text changes, and when it is over.

    Args:
        name: the source.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._latest = ""

    def happened(self, why: str) -> None:
        """Note a failure.

        Args:
            why: for people.
        """
        if why != self._latest:
            logger.warning("source %s: %s", self._name, why)
        self._latest = why

    def over(self) -> None:
        """Note that the source answered."""
        if self._latest:
            logger.warning("source %s answers again", self._name)
        self._latest = ""
