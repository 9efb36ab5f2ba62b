"""For how long a lease certainly lasts, by our own clock."""

import time
from collections.abc import Callable

DRIFT = 0.05
"""What part of a lease is not counted on: the clock of etcd's leader may run faster than ours."""


def boottime() -> float:
    """A clock that never jumps, and goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseValidity:
    """A lease as its holder knows it: it lasts from when a renewal was *sent*, which etcd got later.

    Threads may share it. Once it is over it stays so, whatever a renewal that was under way brings.

    Args:
        clock: seconds, on a clock that never jumps.
    """

    def __init__(self, clock: Callable[[], float] = boottime) -> None:
        self._clock = clock
        self._until = float("-inf")
        self._ended = False
        self._sent = clock()

    def now(self) -> float:
        """The clock's time, to be read before a renewal is sent."""
        return self._clock()

    def renewed(self, sent: float, ttl: float) -> None:
        """Etcd has answered a renewal.

        Args:
            sent: when it was sent.
            ttl: the seconds that etcd gave.
        """
        self._until = max(self._until, sent + ttl * (1 - DRIFT))
        self._sent = sent

    def end(self) -> None:
        """Etcd says that the lease is over, or we have given it up."""
        self._ended = True

    @property
    def age(self) -> float:
        """Seconds since the last renewal that etcd has answered was sent."""
        return self._clock() - self._sent

    @property
    def remaining(self) -> float:
        """Seconds for which it certainly lasts; 0 or less: it may be over."""
        return float("-inf") if self._ended else self._until - self._clock()

    @property
    def certain(self) -> bool:
        """Whether the lease certainly lasts at this moment."""
        return not self._ended and self._clock() < self._until
