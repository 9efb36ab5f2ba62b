"""Says in the log that no coordinator can be reached, while it is so."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

FIRST_REMINDER = 5.0
"""Seconds until the first line: a coordinator that is started again is there before."""


class Outage:
    """The attempts to reach a coordinator, from the first that failed to the first that did not.

    A line names the last failure, so that a wrong certificate or a refused token is seen long before a
    timeout is over. Each one comes after twice the time of the one before.

    Args:
        endpoint: the address or the addresses that are called, for people.
        clock: seconds of a monotonic clock.
    """

    def __init__(self, endpoint: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._since: float | None = None
        self._next = FIRST_REMINDER

    def failed(self, why: str) -> None:
        """An attempt failed.

        Args:
            why: for people.
        """
        now = self._clock()
        if self._since is None:
            self._since, self._next = now, FIRST_REMINDER
        if now - self._since >= self._next:
            self._next *= 2
            logger.warning(
                "the coordinator at %s has been out of reach for %.0f s (%s); trying again",
                self._endpoint,
                now - self._since,
                why,
            )

    def over(self) -> None:
        """The coordinator answered."""
        self._since = None
