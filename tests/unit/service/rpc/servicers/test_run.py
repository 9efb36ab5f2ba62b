"""RunService and what a run's ranks told of their saves, over a driver in virtual time, without a socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from muster.service.core import views
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.driver import Driver
from muster.service.rpc.interceptors.guard import Admission
from muster.service.rpc.servicers.barrier import BarrierServicer
from muster.service.rpc.servicers.run import MAX_WATCHES, MAX_WATCHES_PER_CALLER, RunServicer
from muster.service.security.grants import Grant, Role
from muster.service.snapshots import Snapshots
from muster.v1 import barrier_pb2, common_pb2, run_pb2
from tests.support.admitted import admitted
from tests.support.world.driver_world import virtual_driver
from tests.support.world.virtual_time import in_virtual_time


@asynccontextmanager
async def serving() -> AsyncIterator[Driver]:
    driver = virtual_driver()
    try:
        yield driver
    finally:
        await driver.close()


class Peer:
    """The context of a call.

    Args:
        address: of the caller.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    def peer(self) -> str:
        return f"ipv4:{self._address}:4711"


def viewer(*runs: str, name: str = "ann") -> Grant:
    return Grant(name=name, role=Role.VIEWER, runs=runs, digest=name.encode())


async def decide(driver: Driver, *run_ids: str) -> None:
    """Let one barrier of each run be decided."""
    for run_id in run_ids:
        request = barrier_pb2.ArriveRequest(run_id=run_id, prefix="p", world_size=1, timeout_ms=1_000)
        await BarrierServicer(driver).Arrive(request, None)


class Watcher:
    """A watch that is read all the time.

    Args:
        servicer: the servicer.
        run_id: of which run; empty: of all.
        address: of the caller.
    """

    def __init__(self, servicer: RunServicer, run_id: str = "", address: str = "a") -> None:
        self.runs: list[run_pb2.Run] = []
        self._responses = servicer.Watch(run_pb2.WatchRequest(run_id=run_id), Peer(address))
        self._reads = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for response in self._responses:
            self.runs.append(response.run)

    @property
    def decided(self) -> list[tuple[str, int]]:
        return [(run.run_id, run.decided_barriers) for run in self.runs]

    async def end(self) -> None:
        self._reads.cancel()
        await asyncio.gather(self._reads, return_exceptions=True)


async def save(driver: Driver, **report: object) -> common_pb2.Decision:
    """One rank alone makes a save by a unary call."""
    write = common_pb2.WriteReport(**report)  # type: ignore[arg-type]
    request = barrier_pb2.ArriveRequest(
        run_id="job1", prefix="save", world_size=1, timeout_ms=1_000, host="node-0", write=write
    )
    return (await BarrierServicer(driver).Arrive(request, None)).decision


@in_virtual_time
async def test_get_shows_the_newest_checkpoint_with_its_age():
    async with serving() as driver:
        await save(driver, step=7, bytes=1_024, write_ms=1_500, commits=True)
        await asyncio.sleep(40)
        got = await RunServicer(driver, Snapshots()).Get(run_pb2.RunServiceGetRequest(run_id="job1"), None)
        shown = got.run.checkpoints
        assert (shown.newest.step, shown.newest.bytes, shown.age_ms) == (7, 1_024, 40_000)
        slowest = run_pb2.SlowestWrite(rank=0, host="node-0", write_ms=1_500)
        assert shown.newest.slowest == slowest
        assert shown.newest.barrier == common_pb2.BarrierName(prefix="save", sequence=0)
        assert (shown.committed, shown.HasField("interval_ms"), len(shown.failures)) == (1, False, 0)


@in_virtual_time
async def test_unknown_fields_are_absent_on_the_wire():
    async with serving() as driver:
        await save(driver, commits=True)
        got = await RunServicer(driver, Snapshots()).Get(run_pb2.RunServiceGetRequest(run_id="job1"), None)
        newest = got.run.checkpoints.newest
        assert not any(newest.HasField(field) for field in ("step", "bytes", "slowest"))


@in_virtual_time
async def test_run_without_a_save_has_no_checkpoints_on_the_wire():
    async with serving() as driver:
        request = barrier_pb2.ArriveRequest(run_id="job1", prefix="p", world_size=1, timeout_ms=1_000)
        await BarrierServicer(driver).Arrive(request, None)
        got = await RunServicer(driver, Snapshots()).Get(run_pb2.RunServiceGetRequest(run_id="job1"), None)
        assert not got.run.HasField("checkpoints")


@in_virtual_time
async def test_watch_sends_a_line_for_a_commit_and_none_for_one_that_grows_old():
    async with serving() as driver:
        watched = RunServicer(driver, Snapshots()).Watch(run_pb2.WatchRequest(run_id="job1"), Peer("a"))
        await save(driver, step=1, commits=True)
        lines: list[run_pb2.Run] = []

        async def read() -> None:
            async for response in watched:
                lines.append(response.run)

        reader = asyncio.create_task(read())
        await asyncio.sleep(60)
        assert [line.checkpoints.committed for line in lines][-1:] == [1]
        before = len(lines)
        # Something of another run is decided, so that the watch looks again.
        request = barrier_pb2.ArriveRequest(run_id="job2", prefix="p", world_size=1, timeout_ms=1_000)
        await BarrierServicer(driver).Arrive(request, None)
        await asyncio.sleep(60)
        assert len(lines) == before
        await save(driver, step=2, commits=True)
        await asyncio.sleep(60)
        assert lines[-1].checkpoints.newest.step == 2
        reader.cancel()


@pytest.fixture
def viewed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs of which views were made."""
    made: list[str] = []
    view = views.run

    def counted(run: Any, now: Any) -> views.RunView:
        made.append(run.run_id)
        return view(run, now)

    monkeypatch.setattr(views, "run", counted)
    return made


@in_virtual_time
async def watchers_share_views(viewed: list[str]) -> None:
    async with serving() as driver:
        servicer = RunServicer(driver, Snapshots())
        await decide(driver, "job1", "job2")
        watchers = [Watcher(servicer) for _ in range(40)]
        await asyncio.sleep(10)
        viewed.clear()
        await decide(driver, "job1")
        await asyncio.sleep(10)
        assert all(watcher.decided[-1] == ("job1", 2) for watcher in watchers)
        assert len(viewed) <= 6, "both runs once in each interval in which the call of a rank had a part"
        for watcher in watchers:
            await watcher.end()


def test_watches_share_the_view_of_a_run(viewed: list[str]):
    watchers_share_views(viewed)


@in_virtual_time
async def watcher_causes_views_of_its_runs(viewed: list[str]) -> None:
    async with serving() as driver:
        servicer = RunServicer(driver, Snapshots())
        await decide(driver, "team-a/1", "team-b/1", "team-b/2")
        with admitted(Admission(viewer("team-a/*"))):
            watcher = Watcher(servicer)
            await servicer.List(run_pb2.RunServiceListRequest(), None)
            request = barrier_pb2.BarrierServiceListRequest()
            shown = await BarrierServicer(driver).List(request, None)
        await asyncio.sleep(1)
        named = Watcher(servicer, "team-a/1")
        await asyncio.sleep(1)
        assert set(viewed) == {"team-a/1"}
        assert watcher.decided == named.decided == [("team-a/1", 1)]
        assert {barrier.run_id for barrier in shown.barriers} == {"team-a/1"}
        await watcher.end()
        await named.end()


def test_caller_causes_no_views_of_runs_of_others(viewed: list[str]):
    watcher_causes_views_of_its_runs(viewed)


@in_virtual_time
async def test_watch_that_begins_within_an_interval_misses_no_change():
    async with serving() as driver:
        servicer = RunServicer(driver, Snapshots())
        await decide(driver, "job1")
        first = Watcher(servicer)
        await asyncio.sleep(0.05)
        await decide(driver, "job1")
        await asyncio.sleep(0.05)
        second = Watcher(servicer)
        await asyncio.sleep(10)
        assert first.decided == second.decided == [("job1", 1), ("job1", 2)]
        await first.end()
        await second.end()


@in_virtual_time
async def test_watch_tells_of_a_run_that_is_forgotten():
    async with serving() as driver:
        servicer = RunServicer(driver, Snapshots())
        await decide(driver, "job1", "job2")
        watcher = Watcher(servicer)
        await asyncio.sleep(1)
        await servicer.Forget(run_pb2.ForgetRequest(run_id="job1", force=True), None)
        await asyncio.sleep(1)
        assert [(run.run_id, run.forgotten) for run in watcher.runs[2:]] == [("job1", True)]
        await watcher.end()


async def refused(servicer: RunServicer, address: str) -> Refusal:
    with pytest.raises(Refusal) as refusal:
        await anext(servicer.Watch(run_pb2.WatchRequest(), Peer(address)))
    assert refusal.value.reason is Reason.LIMIT_EXCEEDED
    return refusal.value


@in_virtual_time
async def test_watches_of_one_caller_are_bounded():
    async with serving() as driver:
        servicer = RunServicer(driver, Snapshots())
        await decide(driver, "job1")
        watchers = [Watcher(servicer, address="a") for _ in range(MAX_WATCHES_PER_CALLER)]
        await asyncio.sleep(1)
        refusal = await refused(servicer, "a")
        assert refusal.metadata == {"limit": "max_watches_per_caller", "value": "64"}
        assert "a has 64 watches of runs open" in refusal.message
        with admitted(Admission(viewer("*"))):
            other = Watcher(servicer, address="a")
        await watchers.pop().end()
        again = Watcher(servicer, address="a")
        await asyncio.sleep(1)
        assert other.runs
        assert again.runs
        for watcher in (*watchers, other, again):
            await watcher.end()


@in_virtual_time
async def test_watches_of_all_callers_are_bounded():
    async with serving() as driver:
        servicer = RunServicer(driver, Snapshots())
        each = MAX_WATCHES_PER_CALLER
        watchers = [Watcher(servicer, address=str(number // each)) for number in range(MAX_WATCHES)]
        await asyncio.sleep(1)
        assert (await refused(servicer, "another")).metadata["limit"] == "max_watches"
        for watcher in watchers:
            await watcher.end()
