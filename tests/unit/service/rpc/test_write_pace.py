"""The pace of writes, alone and of sessions."""

import asyncio
from itertools import pairwise

from muster.service.rpc.write_pace import WritePace, WritePaces
from muster.serving.outbox import Outbox, Take
from tests.support.world.session_world import settle, stream


def writers(count: int) -> list[asyncio.Future[None]]:
    loop = asyncio.get_running_loop()
    return [loop.create_future() for _ in range(count)]


async def test_each_pass_wakes_some_streams_in_order():
    pace, waiting = WritePace(most=2), writers(7)
    for writer in waiting:
        pace.wake_up(writer)
    passes = []
    while not all(writer.done() for writer in waiting):
        passes.append([writer.done() for writer in waiting])
        await asyncio.sleep(0)
    counts = [*map(sum, passes), len(waiting)]
    assert all(0 <= after - before <= 2 for before, after in pairwise([0, *counts]))
    assert all(sorted(done, reverse=True) == done for done in passes)


async def test_stream_that_has_ended_takes_no_turn():
    pace, (first, ended, last) = WritePace(most=1), writers(3)
    for writer in (first, ended, last):
        pace.wake_up(writer)
    ended.cancel()
    async with asyncio.timeout(10):
        await last
    pace.wake_up(ended)


async def test_streams_of_a_run_share_a_pace():
    paces, (one, same, other) = WritePaces(most=1), writers(3)
    kept = paces.of("job")
    kept.wake_up(one)
    paces.of("job").wake_up(same)
    paces.of("another").wake_up(other)
    assert (one.done(), same.done(), other.done()) == (True, False, True)


async def test_messages_that_come_before_the_stream_is_woken_are_written_in_order():
    pace, (earlier,) = WritePace(most=1), writers(1)
    outbox, written = Outbox(), []
    outbox.wake_up = pace.wake_up

    async def write(_: int, take: Take) -> None:
        written.append(take())

    writing = asyncio.create_task(outbox.write(write))
    await asyncio.sleep(0)
    pace.wake_up(earlier)
    for data in (b"1", b"2"):
        outbox.put(data)
    outbox.close()
    assert written == []
    async with asyncio.timeout(10):
        await writing
    assert written == [b"1", b"2"]


async def test_sessions_of_a_run_write_at_the_pace_of_the_run():
    paces = WritePaces(most=1)
    async with stream(paces=paces) as one, stream(paces=paces) as other:
        await settle()
        for session in (one, other):
            session.deliver()
        passes = []
        while other.context.heard.empty():
            await asyncio.sleep(0)
            passes.append(one.context.heard.qsize() - other.context.heard.qsize())
        assert 1 in passes, "the first has written, and the other has not"
