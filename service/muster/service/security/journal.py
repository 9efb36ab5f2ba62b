"""Refused tokens in the log: each with what failed, and no more of them than a log bears."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from muster.service.core.vocabulary.refusal import Reason

MAX_LINES = 20
"""Lines of one check within :data:`WINDOW`: whoever reaches the port can cause one."""
WINDOW = 10.0
"""Seconds."""


@dataclass(slots=True)
class _Tally:
    since: float
    written: int = 0
    left_out: int = 0


class Journal:
    """Writes refusals to the log, and counts those that it leaves out.

    Args:
        clock: seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tallies: dict[tuple[str, str], _Tally] = {}

    def refused(self, reason: Reason, check: str, why: str, *, issuer: str = "") -> None:
        """Somebody was refused.

        Args:
            reason: what the caller was told.
            check: what failed, in a word; of these there are few.
            why: the whole of it; nothing of the token.
            issuer: the name of the token's issuer, if it is one's.
        """
        log = structlog.get_logger()
        self._write(log.warning, "token.refused", reason, check, why, issuer)

    def ended(self, reason: Reason, check: str, why: str, *, issuer: str = "") -> None:
        """An open call was ended, as is usual for each token some day; the arguments are the same."""
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
"""Of this process."""
