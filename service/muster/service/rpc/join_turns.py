"""A limit of concurrent joins of one run, so that the start of a large job does not delay other runs."""

import asyncio
from collections import deque
from weakref import WeakValueDictionary

MAX_RANKS = 128
"""Ranks of one run whose joins the driver has and has not answered. A join writes a row for each of its
ranks. So one commit has about this number of the run's rows at most, or those of a single larger join. While
16,384 ranks joined on 2,048 streams, the median decision of 998 other runs took 25 to 62 ms with 512 (four
starts). With 128, it took 7 to 8 ms."""
MIN_WEIGHT = 8
"""Ranks that a join counts as at least, because its message takes time as well. A join that names no ranks is
for all processes of its stream. Without a relay these are few, and relays name the ranks."""


class JoinTurns:
    """Limits the joins of each run.

    Args:
        max_ranks: ranks of one run that join concurrently.
    """

    def __init__(self, max_ranks: int = MAX_RANKS) -> None:
        self._max_ranks = max_ranks
        self._of_run: WeakValueDictionary[str, _RankSemaphore] = WeakValueDictionary()

    def of(self, run_id: str) -> "JoinTurn":
        """Return the turns of one stream of a run. The stream takes one for each of its joins."""
        return JoinTurn(self._of_run.setdefault(run_id, _RankSemaphore(self._max_ranks)))


class _RankSemaphore:
    """Admits a limited number of ranks. Joins are admitted in the order in which they came.

    It lives as long as a stream of its run.

    Args:
        max_ranks: the limit.
    """

    def __init__(self, max_ranks: int) -> None:
        self.max_ranks = max_ranks
        self._free = max_ranks
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, ranks: int) -> None:
        """Wait until this number of ranks is free, and take them."""
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append((ranks, granted))
        self.release(0)
        try:
            await granted
        except asyncio.CancelledError:
            self.release(0 if granted.cancelled() else ranks)
            raise

    def release(self, ranks: int) -> None:
        """Free this number of ranks, for the joins that wait."""
        self._free += ranks
        while self._waiting:
            wanted, granted = self._waiting[0]
            if not granted.cancelled():
                if wanted > self._free:
                    return
                self._free -= wanted
                granted.set_result(None)
            self._waiting.popleft()


class JoinTurn:
    """The turns of one stream.

    Args:
        semaphore: admits the ranks of the run.
    """

    def __init__(self, semaphore: _RankSemaphore) -> None:
        self._semaphore = semaphore
        self._held: deque[int] = deque()
        """The weights of the joins without an answer, the oldest first."""

    async def begin(self, ranks: int) -> None:
        """Wait until this number of ranks may join."""
        weight = min(max(ranks, MIN_WEIGHT), self._semaphore.max_ranks)
        await self._semaphore.acquire(weight)
        self._held.append(weight)

    def end(self) -> None:
        """The oldest join was answered."""
        if self._held:
            self._semaphore.release(self._held.popleft())

    def end_all(self) -> None:
        """The stream ended."""
        while self._held:
            self.end()
