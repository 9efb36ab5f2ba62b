"""A watcher on a loop of virtual time."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest

from muster.v1 import run_pb2 as pb
from muster.watcher.connection import CoordinatorError
from muster.watcher.notice import Notice
from muster.watcher.schedule import FIRST_BACKOFF, REPEAT
from muster.watcher.source import Report, SourceError
from muster.watcher.stats import WatcherStats
from muster.watcher.watcher import MAX_SENDING, Watcher
from tests.support.world.virtual_time import START, in_virtual_time

A, B = Notice(id="test/a", reason="why"), Notice(id="test/b", reason="why")
WALL = 1_700_000_000.0


class Scripted:
    """A source that reports at given times.

    Args:
        reports: seconds from now, and what is in force from then on.
    """

    def __init__(self, *reports: tuple[float, list[Notice]], name: str = "test") -> None:
        self.name = name
        self._reports = reports
        self._made_at = asyncio.get_running_loop().time()

    async def watch(self, report: Report) -> None:
        for at, notices in self._reports:
            await asyncio.sleep(self._made_at + at - asyncio.get_running_loop().time())
            report(notices)
        await asyncio.Event().wait()


class Broken:
    """A source that cannot work."""

    name = "broken"

    async def watch(self, report: Report) -> None:
        raise SourceError("it has no permissions")


class Coordinator:
    """Answers after a second, or fails while it is away.

    Args:
        away_until: seconds from now.
        reason: of its refusals; empty: nobody answers.
    """

    def __init__(self, away_until: float = 0.0, reason: str = "") -> None:
        self.heard: list[tuple[float, str]] = []
        self.calls = self.most_calls = 0
        self._away_until = away_until
        self._reason = reason
        self._made_at = asyncio.get_running_loop().time()

    async def __call__(self, notice: Notice) -> Sequence[pb.DrainedRun]:
        at = asyncio.get_running_loop().time() - self._made_at
        self.heard.append((at, notice.id))
        if at < self._away_until:
            raise CoordinatorError("it is away", self._reason)
        self.calls += 1
        self.most_calls = max(self.most_calls, self.calls)
        await asyncio.sleep(1.0)
        self.calls -= 1
        return [pb.DrainedRun(run_id="job", save=pb.Save(number=1))]


class Heard:
    """What the observer heard."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def began(self, source: str, notice: Notice) -> None:
        self.events.append(f"began {source} {notice.id}")

    def changed(self, source: str, notice: Notice) -> None:
        self.events.append(f"changed {source} {notice.id}")

    def withdrawn(self, source: str, notice: Notice) -> None:
        self.events.append(f"withdrawn {source} {notice.id}")

    def answered(self, notice: Notice, runs: Sequence[pb.DrainedRun]) -> None:
        self.events.append(f"answered {notice.id} {len(runs)}")

    def failed(self, notice: Notice, error: CoordinatorError) -> None:
        self.events.append(f"failed {notice.id}")


async def watched(
    sources: Sequence[Scripted | Broken], coordinator: Coordinator, seconds: float
) -> tuple[WatcherStats, list[str]]:
    stats, heard = WatcherStats(), Heard()
    loop = asyncio.get_running_loop()
    watcher = Watcher(sources, coordinator, stats, heard, loop.time, lambda: WALL + loop.time())
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await watcher.run()
    return stats, heard.events


@in_virtual_time
async def test_notice_is_sent_at_once_and_then_regularly():
    coordinator = Coordinator()
    stats, events = await watched([Scripted((2.0, [A]))], coordinator, 30.0)
    assert coordinator.heard == [(2.0 + n * (REPEAT + 1.0), "test/a") for n in range(3)]
    assert events == ["began test test/a", "answered test/a 1"]
    assert (stats.notices, stats.requests) == ({"test": 1}, {"answered": 3})
    assert stats.in_force == {"test": 1}
    assert stats.reported_at == {"test": WALL + START + 2.0}


@in_virtual_time
async def test_source_that_has_not_reported_has_no_time():
    stats, _ = await watched([Scripted()], Coordinator(), 3.0)
    assert stats.reported_at == {"test": 0.0}


@in_virtual_time
async def test_withdrawn_notice_is_not_repeated():
    coordinator = Coordinator()
    stats, events = await watched([Scripted((0.0, [A]), (5.0, []))], coordinator, 60.0)
    assert coordinator.heard == [(0.0, "test/a")]
    assert events[-1] == "withdrawn test test/a"
    assert stats.in_force == {"test": 0}


@in_virtual_time
async def test_notice_reaches_a_coordinator_that_was_away():
    for reason, result in (("", "failed"), ("NODE_NOT_ALLOWED", "refused")):
        coordinator = Coordinator(away_until=FIRST_BACKOFF * 2, reason=reason)
        stats, events = await watched([Scripted((0.0, [A]))], coordinator, 8.0)
        assert [at for at, _ in coordinator.heard] == [0.0, FIRST_BACKOFF, FIRST_BACKOFF * 3]
        assert events == ["began test test/a", "failed test/a", "answered test/a 1"]
        assert stats.requests == {result: 2, "answered": 1}


@in_virtual_time
async def test_slow_request_does_not_hold_up_another_notice():
    coordinator = Coordinator()
    await watched([Scripted((0.0, [A]), (0.5, [A, B]))], coordinator, 5.0)
    assert coordinator.heard == [(0.0, "test/a"), (0.5, "test/b")]


@in_virtual_time
async def test_requests_at_once_are_bounded():
    coordinator = Coordinator()
    many = [Notice(id=f"test/{n}", reason="why") for n in range(3 * MAX_SENDING)]
    await watched([Scripted((0.0, many))], coordinator, 5.0)
    assert coordinator.most_calls == MAX_SENDING
    assert len(coordinator.heard) == len(many)


@in_virtual_time
async def test_notice_is_sent_again_if_its_call_is_cancelled():
    class Cancels(Coordinator):
        async def __call__(self, notice: Notice) -> Sequence[pb.DrainedRun]:
            if not self.heard:
                await super().__call__(notice)
                raise asyncio.CancelledError
            return await super().__call__(notice)

    coordinator = Cancels()
    await watched([Scripted((0.0, [A]))], coordinator, 5.0)
    assert [at for at, _ in coordinator.heard] == [0.0, 1.0 + FIRST_BACKOFF]


@in_virtual_time
async def test_source_that_cannot_work_ends_the_watcher():
    with pytest.raises(SourceError, match="it has no permissions"):
        await watched([Scripted((0.0, [A])), Broken()], Coordinator(), 5.0)
