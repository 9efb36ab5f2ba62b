"""A limit of concurrent joins of one run, so that the start of a large job does not delay other runs."""

import asyncio
from weakref import WeakValueDictionary

MAX_JOINS = 64
"""Joins of one run that the driver has and has not answered. A join writes a row for each of its ranks, so
with 8 ranks for each stream one commit has at most about 500 rows of the run."""


class JoinTurns:
    """Limits the joins of each run.

    Args:
        most: concurrent joins of one run.
    """

    def __init__(self, most: int = MAX_JOINS) -> None:
        self._most = most
        self._of_run: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def of(self, run_id: str) -> "JoinTurn":
        """Return the turn of one stream of a run. The stream takes it for its joins."""
        return JoinTurn(self._of_run.setdefault(run_id, asyncio.Semaphore(self._most)))


class JoinTurn:
    """The turn of one stream.

    Args:
        turns: the semaphore of the run. It lives as long as a stream of the run.
    """

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self._turns = turns
        self._held = False

    async def begin(self) -> None:
        """Wait until this stream may join. A stream that already has its turn keeps it."""
        if not self._held:
            await self._turns.acquire()
            self._held = True

    def end(self) -> None:
        """Give the turn back: the join was answered or the stream ended. A second call does nothing."""
        if self._held:
            self._held = False
            self._turns.release()
