"""When the core must be woken."""

import heapq
import itertools
import math
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T", bound=Hashable)
Mine = TypeVar("Mine", contravariant=True)

MIN_STALE_ENTRIES = 64
"""Fewest stale entries that are worth clearing away."""


class WakeUps(Protocol[Mine]):
    """The timers as one kind of item sees them; other kinds may share them."""

    def arm(self, item: Mine, at: float) -> None:
        """See :class:`Timers`."""
        ...

    def disarm(self, item: Mine) -> None:
        """See :class:`Timers`."""
        ...


class Timers(Generic[T]):
    """At most one pending time per item, kept as a heap with stale entries skipped.

    A barrier lives for milliseconds and its deadline for minutes, so deadlines are not taken out when
    a barrier is decided: the item is checked when its time comes, and armed again.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._armed: dict[T, float] = {}
        self._tie = itertools.count()

    def arm(self, item: T, at: float) -> None:
        """Wake ``item`` at ``at``, or earlier if it is armed for an earlier time; at infinity, never."""
        if self._armed.get(item, float("inf")) > at:
            self._armed[item] = at
            heapq.heappush(self._heap, (at, next(self._tie), item))

    def disarm(self, item: T) -> None:
        """Cancel the time of ``item``."""
        self._armed.pop(item, None)
        # Many items may be armed for much later and disarmed at once: stale entries must not pile up.
        if len(self._heap) > 2 * len(self._armed) + MIN_STALE_ENTRIES:
            self._heap = [entry for entry in self._heap if self._armed.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def next_time(self) -> float | None:
        """Return the earliest time at which an item may be due."""
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float, most: float = math.inf) -> list[T]:
        """Disarm and return the items that are due, earliest first, at most ``most`` of them."""
        due: list[T] = []
        while self._heap and self._heap[0][0] <= now and len(due) < most:
            at, _, item = heapq.heappop(self._heap)
            if self._armed.get(item) == at:
                del self._armed[item]
                due.append(item)
        return due
