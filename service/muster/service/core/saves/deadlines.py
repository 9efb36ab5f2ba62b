"""Deadlines of requested saves, on two clocks: the monotonic one decides, the wall clock is for people."""

from typing import NamedTuple

from muster.service.core.vocabulary.model import Instant

MIN_SHORTENING = 1.0
"""Seconds by which a deadline must be earlier to count: ranks that get one signal differ by less."""


class Due(NamedTuple):
    """When a save must be complete."""

    at: float
    """On the monotonic clock."""
    wall: float
    """In seconds since 1970, as it was when the request came."""


def due_in(seconds: float | None, now: Instant) -> Due | None:
    """Return the deadline that is a number of seconds away; None: no deadline."""
    return Due(now.monotonic + seconds, now.wall + seconds) if seconds is not None else None


def due_at(wall: float | None, now: Instant) -> Due | None:
    """Return a stored deadline, which may have passed."""
    return Due(now.monotonic + wall - now.wall, wall) if wall is not None else None


def earlier(new: Due | None, pending: Due | None, now: Instant) -> Due | None:
    """Return the earlier of two deadlines. If that of the pending request has passed, the new one counts."""
    if pending is None or pending.at <= now.monotonic:
        return new
    return pending if new is None or pending.at <= new.at else new


def replaces(new: Due | None, pending: Due | None, now: Instant, *, repeated: bool) -> bool:
    """Whether a new deadline replaces that of the pending request, which covers the new one.

    Args:
        new: the deadline.
        pending: that of the pending request.
        now: the current time.
        repeated: whether the run has had the notice. A repeated notice does not replace a passed deadline.
    """
    if new is None:
        return False
    if pending is None:
        return True
    if pending.at <= now.monotonic:
        return not repeated
    return new.at <= pending.at - MIN_SHORTENING
