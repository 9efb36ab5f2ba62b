"""Refused tokens in the log: each with what failed, and no more of them than a log bears."""

import time
from collections.abc import Callable

import structlog

from muster.service.core.refusal import Reason

MOST = 20
"""Lines within :data:`WINDOW`: whoever reaches the port can cause one."""
WINDOW = 10.0
"""Seconds."""


class Journal:
    """Writes refusals to the log, and counts those that it leaves out.

    Args:
        clock: seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = float("-inf")
        self._written = 0
        self._left_out = 0

    def refused(self, reason: Reason, check: str, why: str, *, issuer: str = "") -> None:
        """Somebody was refused.

        Args:
            reason: what the caller was told.
            check: what failed, in a word.
            why: the whole of it; nothing of the token.
            issuer: the name of the token's issuer, if it is one's.
        """
        now = self._clock()
        if now - self._since >= WINDOW:
            self._since, self._written = now, 0
        if self._written >= MOST:
            self._left_out += 1
            return
        self._written += 1
        facts: dict[str, str | int] = {"issuer": issuer} if issuer else {}
        if self._left_out:
            facts["left_out"] = self._left_out
            self._left_out = 0
        structlog.get_logger().warning("token.refused", reason=reason.name, check=check, message=why, **facts)


JOURNAL = Journal()
"""Of this process."""
