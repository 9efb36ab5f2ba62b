"""When a run that nobody uses is forgotten."""

import math
from dataclasses import dataclass

from muster.service.core.run import Run
from muster.service.core.vocabulary.model import Instant

USE_RECORD_INTERVAL = 600.0
"""Seconds of its idle time that a run may gain or lose by a restart: its last activity is written down when
the one that is on disk is older than that. It is also what everyone has to come back after a restart."""
MAX_RUNS_PER_REVIEW = 100
"""Runs that one step looks at, so that forgetting many does not keep others waiting."""
REVIEW_PAUSE = 0.05
"""Seconds until the next of those steps, so that a commit has not many of them to carry out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """For how many seconds a run is kept that nobody uses; 0 keeps it for ever."""

    closed: float = 86_400.0
    """A closed run."""
    idle: float = 604_800.0
    """Any other."""

    def of(self, run: Run) -> float:
        """For how many seconds this run is kept."""
        return self.closed if run.closed is not None else self.idle

    def due(self, run: Run) -> float:
        """When the run is forgotten if nobody uses it until then, on the monotonic clock."""
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
