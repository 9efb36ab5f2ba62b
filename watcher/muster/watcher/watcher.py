"""Runs the sources of a node, and sends their notices to the coordinator."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from muster.v1 import run_pb2 as pb
from muster.watcher.connection import CoordinatorError
from muster.watcher.drain import Drain
from muster.watcher.notice import Notice
from muster.watcher.schedule import Schedule, Standing
from muster.watcher.source import Source, SourceError
from muster.watcher.stats import WatcherStats

MAX_SENDING = 8
"""Requests at once."""
RESULTS = ANSWERED, REFUSED, FAILED = "answered", "refused", "failed"
"""The results of requests."""


class Observer(Protocol):
    """Hears what a watcher does, such as for its log."""

    def began(self, source: str, notice: Notice) -> None:
        """A notice came."""

    def changed(self, source: str, notice: Notice) -> None:
        """A notice in force has another reason, deadline or effect than before."""

    def withdrawn(self, source: str, notice: Notice) -> None:
        """A notice is no longer in force."""

    def answered(self, notice: Notice, runs: Sequence[pb.DrainedRun]) -> None:
        """The coordinator gave another answer than the last time."""

    def failed(self, notice: Notice, error: CoordinatorError) -> None:
        """A request failed, with another error than the last time."""


class Watcher:
    """Watches one node.

    Args:
        sources: of notices; each name once.
        drain: sends a notice.
        stats: what is measured.
        observer: hears what happens.
        clock: seconds of a monotonic clock, that of the event loop.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        drain: Drain,
        stats: WatcherStats,
        observer: Observer,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._sources = sources
        self._drain = drain
        self._stats = stats
        self._observer = observer
        self._clock = clock
        self._wall_clock = wall_clock
        self._schedule = Schedule()
        self._wake = asyncio.Event()
        self._slots = asyncio.Semaphore(MAX_SENDING)
        for source in sources:
            stats.in_force[source.name] = 0
            stats.reported_at[source.name] = 0.0

    async def run(self) -> None:
        """Watch until cancelled.

        Raises:
            SourceError: a source cannot work here.
        """
        try:
            await self._run()
        except BaseExceptionGroup as group:
            raise source_error(group) or group from group

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for source in self._sources:
                tasks.create_task(self._watch(source), name=f"muster-watch-{source.name}")
            while True:
                self._wake.clear()
                for standing in self._schedule.begin_due(self._clock()):
                    tasks.create_task(self._send(standing), name="muster-watch-send")
                await self._until_due()

    async def _watch(self, source: Source) -> None:
        await source.watch(lambda notices: self._report(source.name, notices))

    def _report(self, source: str, notices: Iterable[Notice]) -> None:
        changes = self._schedule.report(source, notices, self._clock())
        self._stats.notices[source] += len(changes.new)
        self._stats.in_force[source] = self._schedule.in_force(source)
        self._stats.reported_at[source] = self._wall_clock()
        for notice in changes.new:
            self._observer.began(source, notice)
        for notice in changes.changed:
            self._observer.changed(source, notice)
        for notice in changes.withdrawn:
            self._observer.withdrawn(source, notice)
        self._wake.set()

    async def _until_due(self) -> None:
        due = self._schedule.next_due()
        try:
            async with asyncio.timeout(None if due is None else max(due - self._clock(), 0.0)):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _send(self, standing: Standing) -> None:
        notice = standing.sending or standing.notice
        try:
            async with self._slots:
                runs = await self._drain(notice)
        except CoordinatorError as error:
            self._stats.requests[REFUSED if error.reason else FAILED] += 1
            if self._schedule.failed(standing, (error.reason, str(error)), self._clock()):
                self._observer.failed(notice, error)
        except asyncio.CancelledError:
            # If the call alone was cancelled, the watcher goes on, and must send the notice again.
            self._schedule.failed(standing, "cancelled", self._clock())
            raise
        else:
            self._stats.requests[ANSWERED] += 1
            outcome = tuple((run.run_id, run.save.number) for run in runs)
            if self._schedule.answered(standing, outcome, self._clock()):
                self._observer.answered(notice, runs)
        finally:
            self._wake.set()


def source_error(group: BaseExceptionGroup) -> SourceError | None:
    """Return the first error of a source in a group; None if it has none."""
    for error in group.exceptions:
        if isinstance(error, SourceError):
            return error
        if isinstance(error, BaseExceptionGroup) and (found := source_error(error)):
            return found
    return None
