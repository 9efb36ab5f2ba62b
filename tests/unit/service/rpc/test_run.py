"""RunService and what a run's ranks told of their saves, over a driver in virtual time, without a socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from muster.service.core.limits import Limits
from muster.service.driver import Driver
from muster.service.rpc import codec
from muster.service.rpc.barrier import BarrierServicer
from muster.service.rpc.run import RunServicer
from muster.service.storage.memory import MemoryEngine
from muster.service.telemetry.observers import Observers
from muster.v1 import barrier_pb2, common_pb2, run_pb2
from tests.support.virtual_time import LoopClock, in_virtual_time


@asynccontextmanager
async def serving() -> AsyncIterator[Driver]:
    driver = Driver(
        MemoryEngine(),
        clock=LoopClock(),
        observer=Observers(),
        encode=codec.encode_session_message,
        session_ttl=10.0,
        limits=Limits(),
    )
    try:
        yield driver
    finally:
        await driver.close()


async def save(driver: Driver, **told: object) -> common_pb2.Decision:
    """One rank alone makes a save by a unary call."""
    write = common_pb2.WriteReport(**told)  # type: ignore[arg-type]
    request = barrier_pb2.ArriveRequest(
        run_id="job1", prefix="save", world_size=1, timeout_ms=1_000, host="node-0", write=write
    )
    return (await BarrierServicer(driver).Arrive(request, None)).decision


@in_virtual_time
async def test_get_shows_the_newest_checkpoint_with_its_age():
    async with serving() as driver:
        await save(driver, step=7, bytes=1_024, write_ms=1_500, commits=True)
        await asyncio.sleep(40)
        got = await RunServicer(driver).Get(run_pb2.RunServiceGetRequest(run_id="job1"), None)
        shown = got.run.checkpoints
        assert (shown.newest.step, shown.newest.bytes, shown.age_ms) == (7, 1_024, 40_000)
        slowest = run_pb2.SlowestWrite(rank=0, host="node-0", write_ms=1_500)
        assert shown.newest.slowest == slowest
        assert shown.newest.barrier == common_pb2.BarrierName(prefix="save", sequence=0)
        assert (shown.committed, shown.HasField("interval_ms"), len(shown.failures)) == (1, False, 0)


@in_virtual_time
async def test_what_is_not_told_is_absent_on_the_wire():
    async with serving() as driver:
        await save(driver, commits=True)
        got = await RunServicer(driver).Get(run_pb2.RunServiceGetRequest(run_id="job1"), None)
        newest = got.run.checkpoints.newest
        assert not any(newest.HasField(field) for field in ("step", "bytes", "slowest"))


@in_virtual_time
async def test_run_without_a_save_has_no_checkpoints_on_the_wire():
    async with serving() as driver:
        request = barrier_pb2.ArriveRequest(run_id="job1", prefix="p", world_size=1, timeout_ms=1_000)
        await BarrierServicer(driver).Arrive(request, None)
        got = await RunServicer(driver).Get(run_pb2.RunServiceGetRequest(run_id="job1"), None)
        assert not got.run.HasField("checkpoints")


@in_virtual_time
async def test_watch_sends_a_line_for_a_commit_and_none_for_one_that_grows_old():
    async with serving() as driver:
        watched = RunServicer(driver).Watch(run_pb2.WatchRequest(run_id="job1"), None)
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
