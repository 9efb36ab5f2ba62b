"""How long an unused run is kept."""

import math
from dataclasses import dataclass

from muster.service.core.run import Run
from muster.service.core.vocabulary.model import Instant

USE_RECORD_INTERVAL = 600.0
"""Seconds between two records of a run's last use. A restart shifts its idle time by no more than that.
Clients also have this long to come back after a restart."""
MAX_RUNS_PER_REVIEW = 100
"""Runs that one step reviews, so that the removal of many runs does not delay other events."""
REVIEW_PAUSE = 0.05
"""Seconds between two such steps, so that one commit does not hold many removals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Seconds for which an unused run is kept; 0 keeps it for ever."""

    closed: float = 86_400.0
    """A closed run."""
    idle: float = 604_800.0
    """Any other."""

    def of(self, run: Run) -> float:
        """Return the retention time of this run, in seconds."""
        return self.closed if run.closed is not None else self.idle

    def due(self, run: Run) -> float:
        """Return when the run is removed if it stays unused, on the monotonic clock."""
        return run.last_used.monotonic + (self.of(run) or math.inf)

    def restore(self, run: Run, active_at: float, now: Instant) -> None:
        """Restore when a run was last used.

        Only the wall clock knows how long ago that was, and it may be wrong. So processes always have
        ``USE_RECORD_INTERVAL`` to come back after a restart, or the retention time if that is shorter.

        Args:
            run: the run; whether it is closed decides its retention time.
            active_at: seconds since 1970.
            now: the current time.
        """
        age = max(0.0, now.wall - active_at)
        run.recorded_use = Instant(now.monotonic - age, active_at)
        keep = self.of(run) or math.inf
        run.last_used = Instant(now.monotonic - min(age, max(0.0, keep - USE_RECORD_INTERVAL)), active_at)


FOR_EVER = Retention(closed=0.0, idle=0.0)
