"""For how long a lease certainly lasts, by this machine's clock."""

import time
from collections.abc import Callable

DRIFT = 0.05
"""The part of a lease that is not relied on: the clock of etcd's leader may run faster than ours."""


def boottime() -> float:
    """Return the time of a clock that never jumps and goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseValidity:
    """The time for which the holder of a lease may rely on it.

    The lease counts from when a renewal was *sent*; etcd received it later. Threads may share this object.
    Once the lease has ended, the answer to a renewal in flight does not revive it.

    Args:
        clock: seconds, on a clock that never jumps.
    """

    def __init__(self, clock: Callable[[], float] = boottime) -> None:
        self._clock = clock
        self._until = float("-inf")
        self._ended = False
        self._sent = clock()

    def now(self) -> float:
        """Return the clock's time. Read it before sending a renewal."""
        return self._clock()

    def renewed(self, sent: float, ttl: float) -> None:
        """Take note of the answer to a renewal.

        Args:
            sent: the time at which the renewal was sent.
            ttl: the seconds that etcd granted.
        """
        self._until = max(self._until, sent + ttl * (1 - DRIFT))
        self._sent = sent

    def end(self) -> None:
        """Take note that etcd reports the end of the lease, or that we gave it up."""
        self._ended = True

    @property
    def age(self) -> float:
        """Seconds since the last answered renewal was sent."""
        return self._clock() - self._sent

    @property
    def remaining(self) -> float:
        """Seconds for which the lease certainly lasts; 0 or less: it may be over."""
        return float("-inf") if self._ended else self._until - self._clock()

    @property
    def certain(self) -> bool:
        """Whether the lease certainly lasts at this moment."""
        return not self._ended and self._clock() < self._until
