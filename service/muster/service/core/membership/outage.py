"""Connections that end together, as of all ranks behind a proxy that is started again.

Such processes come back one after the other, because the coordinator can welcome only some hundreds a second.
So those that still wait for their turn must not be lost meanwhile.
"""

import math
from dataclasses import dataclass

TOGETHER = 1.0
"""Seconds from the first to the last loss of an outage."""
CATCHING_UP = 1.0
"""Seconds after one process has come back, within which the next one of its outage should."""


@dataclass(slots=True, eq=False)
class Outage:
    """Losses of connections that may have one cause."""

    began: float
    """On the monotonic clock."""
    last_return: float = -math.inf
    """When one of its processes last came back."""


class Outages:
    """Tells which losses belong together."""

    def __init__(self) -> None:
        self._last = Outage(-math.inf)

    def at(self, now: float) -> Outage:
        """Return the outage of a connection that ends now."""
        if now > self._last.began + TOGETHER:
            self._last = Outage(now)
        return self._last


@dataclass(frozen=True, slots=True)
class Absence:
    """The time that a process has to come back, on the monotonic clock."""

    usual: float
    """When it ends."""
    latest: float
    """When it ends at the latest, while others of its outage are coming back."""
    outage: Outage

    def over(self, now: float) -> None:
        """Record that the process is back: the others of its outage may be coming back, too."""
        self.outage.last_return = now

    @property
    def ends(self) -> float:
        """When the process is lost, as far as known."""
        return max(self.usual, min(self.latest, self.outage.last_return + CATCHING_UP))
