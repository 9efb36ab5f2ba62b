"""How many streams of one run join at once, so that the start of a large job does not hold up other runs."""

import asyncio
from weakref import WeakValueDictionary

MAX_JOINS = 64
"""Joins of one run that are handed to the driver and not answered yet. A join writes a row for each of its
ranks, so with 8 ranks a stream one commit has at most about 500 rows of the run."""


class JoinTurns:
    """Gives each run its own turns.

    Args:
        most: joins of one run that may be under way.
    """

    def __init__(self, most: int = MAX_JOINS) -> None:
        self._most = most
        self._of_run: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def of(self, run_id: str) -> "JoinTurn":
        """The turn of one stream of a run, which takes it for each of its joins."""
        return JoinTurn(self._of_run.setdefault(run_id, asyncio.Semaphore(self._most)))


class JoinTurn:
    """One stream's turn.

    Args:
        turns: of all streams of the run, which are kept for as long as one of these streams is there.
    """

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self._turns = turns
        self._held = False

    async def begin(self) -> None:
        """Wait until this stream may join. A stream that has the turn already keeps it."""
        if not self._held:
            await self._turns.acquire()
            self._held = True

    def end(self) -> None:
        """The join was answered, or the stream is over. To end it twice does no harm."""
        if self._held:
            self._held = False
            self._turns.release()
