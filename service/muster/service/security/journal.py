"""Log lines about refused tokens, each with the failed check, and limited in number."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from muster.service.core.vocabulary.refusal import Reason

MAX_LINES = 20
"""Lines of one check within :data:`WINDOW`, because anyone who reaches the port can cause lines."""
WINDOW = 10.0
"""Seconds."""


@dataclass(slots=True)
class _Tally:
    since: float
    written: int = 0
    left_out: int = 0


class Journal:
    """Logs refusals, and counts the dropped ones.

    Args:
        clock: seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tallies: dict[tuple[str, str], _Tally] = {}

    def refused(self, reason: Reason, check: str, why: str, *, issuer: str = "") -> None:
        """Log a refusal.

        Args:
            reason: the reason for the caller.
            check: the failed check, one of a few words.
            why: the full explanation, without any part of the token.
            issuer: the name of the token's issuer; empty: it has no issuer.
        """
        log = structlog.get_logger()
        self._write(log.warning, "token.refused", reason, check, why, issuer)

    def ended(self, reason: Reason, check: str, why: str, *, issuer: str = "") -> None:
        """Log the end of an open call, which is usual when a token expires. The arguments are the same."""
        self._write(structlog.get_logger().info, "token.ended", reason, check, why, issuer)

    def _write(
        self, log: Callable[..., object], event: str, reason: Reason, check: str, why: str, issuer: str
    ) -> None:
        now = self._clock()
        tally = self._tallies.setdefault((event, check), _Tally(now))
        if now - tally.since >= WINDOW:
            tally.since, tally.written = now, 0
        if tally.written >= MAX_LINES:
            tally.left_out += 1
            return
        tally.written += 1
        facts: dict[str, str | int] = {"issuer": issuer} if issuer else {}
        if tally.left_out:
            facts["left_out"] = tally.left_out
            tally.left_out = 0
        log(event, reason=reason.name, check=check, message=why, **facts)


JOURNAL = Journal()
"""The journal of this process."""
