"""A limit of one run's writes in one pass of the event loop.

Without it, a decision for thousands of streams is written in one pass, and other runs' decisions wait for its
end.
"""

import asyncio
from collections import deque
from weakref import WeakValueDictionary

MAX_WRITES = 64
"""Writes of one run that begin in one pass of the event loop. Each takes some tens of microseconds of it."""


class WritePaces:
    """Paces the writes of each run.

    Args:
        most: writes of one run in one pass.
    """

    def __init__(self, most: int = MAX_WRITES) -> None:
        self._most = most
        self._of_run: WeakValueDictionary[str, WritePace] = WeakValueDictionary()

    def of(self, run_id: str) -> "WritePace":
        """Return the pace that all streams of a run share."""
        return self._of_run.setdefault(run_id, WritePace(self._most))


class WritePace:
    """Counts the writes that begin in a pass, whenever they end: a peer that does not read delays no other.

    Args:
        most: writes in one pass.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._left = most
        self._waiting: deque[asyncio.Future[None]] = deque()

    def turn(self) -> asyncio.Future[None] | None:
        """Take a turn. Returns what to wait for before the write begins; None: it may begin immediately."""
        if self._left and not self._waiting:
            self._begin()
            return None
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append(granted)
        return granted

    def _begin(self) -> None:
        if self._left == self._most:
            asyncio.get_running_loop().call_soon(self._next_pass)
        self._left -= 1

    def _next_pass(self) -> None:
        self._left = self._most
        while self._left and self._waiting:
            granted = self._waiting.popleft()
            if not granted.cancelled():
                self._begin()
                granted.set_result(None)
