"""A limit of concurrent joins of one run, so that the start of a large job does not delay other runs."""

import asyncio
from collections import deque
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
    """The ranks of one run that may join now. It lives as long as a stream of the run.

    Args:
        most: of them.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._free = most
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        """In the order in which they came, so that a large join is not overtaken for ever."""

    async def take(self, ranks: int) -> None:
        """Wait until so many are free, and take them."""
        place = asyncio.get_running_loop().create_future()
        self._waiting.append((ranks, place))
        self.give(0)
        try:
            await place
        except asyncio.CancelledError:
            self.give(0 if place.cancelled() else ranks)
            raise

    def give(self, ranks: int) -> None:
        """Give so many back, for those that wait."""
        self._free += ranks
        while self._waiting:
            wanted, place = self._waiting[0]
            if not place.cancelled():
                if wanted > self._free:
                    return
                self._free -= wanted
                place.set_result(None)
            self._waiting.popleft()


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
        if not self._held:
            wanted = min(max(ranks, LEAST), self._of_run.most)
            await self._of_run.take(wanted)
            self._held = wanted

    def end(self) -> None:
        """Give the turn back: the join was answered or the stream ended. A second call does nothing."""
        held, self._held = self._held, 0
        self._of_run.give(held)
