"""A limit of one run's writes in one pass of the event loop.

Without it, a decision for thousands of streams is written in one pass, and other runs' decisions wait for its
end.
"""

import asyncio
from collections import deque
from weakref import WeakValueDictionary

from muster.serving.outbox import wake_now

MAX_WRITERS = 128
"""Streams of one run that begin to write in one pass of the event loop. A write takes some tens of
microseconds."""


class WritePaces:
    """Paces the writes of each run.

    Args:
        most: streams of one run that begin to write in one pass.
    """

    def __init__(self, most: int = MAX_WRITERS) -> None:
        self._most = most
        self._of_run: WeakValueDictionary[str, WritePace] = WeakValueDictionary()

    def of(self, run_id: str) -> "WritePace":
        """Return the pace that all streams of a run share."""
        return self._of_run.setdefault(run_id, WritePace(self._most))


class WritePace:
    """Wakes some streams in each pass. It waits for none: a peer that does not read delays no other.

    Args:
        most: streams in one pass.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._left = most
        self._waiting: deque[asyncio.Future[None]] = deque()

    def wake_up(self, writer: asyncio.Future[None]) -> None:
        """Wake a stream's loop that writes, in this pass or a later one.

        Args:
            writer: what the loop waits for.
        """
        if self._left and not self._waiting:
            self._wake(writer)
        else:
            self._waiting.append(writer)

    def _wake(self, writer: asyncio.Future[None]) -> None:
        if self._left == self._most:
            asyncio.get_running_loop().call_soon(self._next_pass)
        self._left -= 1
        wake_now(writer)

    def _next_pass(self) -> None:
        self._left = self._most
        while self._left and self._waiting:
            writer = self._waiting.popleft()
            if not writer.done():
                self._wake(writer)
