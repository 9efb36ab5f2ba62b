"""Logs that no coordinator can be reached."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

FIRST_REMINDER = 5.0
"""Seconds until the first log line: a restarted coordinator is back earlier."""


class OutageLog:
    """The failed attempts to reach a coordinator, until one succeeds.

    Each log line names the last failure, so people see a wrong certificate or a refused token long before a
    timeout. The time between two lines doubles.

    Args:
        endpoint: the coordinator's addresses, for people.
        clock: seconds of a monotonic clock.
    """

    def __init__(self, endpoint: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._since: float | None = None
        self._next = FIRST_REMINDER

    def failed(self, why: str) -> None:
        """Note that an attempt has failed.

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
        """Note that the coordinator has answered."""
        self._since = None
