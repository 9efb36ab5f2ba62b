"""The counts of a watcher, for its metrics."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class WatcherStats:
    """Counters, which only rise, and gauges."""

    notices: Counter[str] = field(default_factory=Counter)
    """By source: notices that came."""
    in_force: dict[str, int] = field(default_factory=dict)
    """By source: notices in force."""
    reported_at: dict[str, float] = field(default_factory=dict)
    """By source: when it was last known to work, in seconds since 1970; 0: never."""
    requests: Counter[str] = field(default_factory=Counter)
    """By result: requests to the coordinator."""
