"""A limit of concurrent joins of one run, so that the start of a large job does not delay other runs."""

import asyncio
from weakref import WeakValueDictionary

MAX_RANKS = 512
"""Ranks of one run whose joins the driver has and has not answered. A join writes a row for each of its
ranks. So one commit has about this number of the run's rows at most, or those of a single larger join."""
LEAST = 8
"""Ranks that a join counts as at least, for its message takes time as well."""


class JoinTurns:
    """Limits the joins of each run.

    Args:
        most: ranks of one run that join concurrently.
    """

    def __init__(self, most: int = MAX_RANKS) -> None:
        self._most = most
        self._of_run: WeakValueDictionary[str, _Ranks] = WeakValueDictionary()

    def of(self, run_id: str) -> "JoinTurn":
        """Return the turn of one stream of a run. The stream takes it for its joins."""
        return JoinTurn(self._of_run.setdefault(run_id, _Ranks(self._most)))


class _Ranks:
    """The ranks that may join concurrently. It lives as long as a stream of the run."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.free = asyncio.Semaphore(most)
        self.first = asyncio.Lock()
        """One stream at a time takes places, so that no two wait for each other's."""


class JoinTurn:
    """The turn of one stream.

    Args:
        of_run: the ranks of the run that may join.
    """

    def __init__(self, of_run: _Ranks) -> None:
        self._of_run = of_run
        self._held = 0

    async def begin(self, ranks: int) -> None:
        """Wait until so many ranks of this stream may join. A stream that already has its turn keeps it."""
        if self._held:
            return
        wanted = min(max(ranks, LEAST), self._of_run.most)
        async with self._of_run.first:
            while self._held < wanted:
                await self._of_run.free.acquire()
                self._held += 1

    def end(self) -> None:
        """Give the turn back: the join was answered or the stream ended. A second call does nothing."""
        while self._held:
            self._held -= 1
            self._of_run.free.release()
