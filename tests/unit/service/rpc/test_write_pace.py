"""The pace of writes, without a session."""

import asyncio
from itertools import pairwise

from muster.service.rpc.write_pace import WritePace, WritePaces


async def test_each_pass_begins_some_writes_in_order():
    pace, begun = WritePace(most=2), []

    async def write(number: int) -> None:
        turn = pace.turn()
        if turn is not None:
            await turn
        begun.append(number)

    writes = [asyncio.create_task(write(number)) for number in range(7)]
    passes = []
    while len(begun) < len(writes):
        await asyncio.sleep(0)
        passes.append(list(begun))
    assert begun == list(range(7))
    assert all(len(after) - len(before) <= 2 for before, after in pairwise(passes))


async def test_write_that_is_cancelled_takes_no_turn():
    pace = WritePace(most=1)
    assert pace.turn() is None
    first, second = pace.turn(), pace.turn()
    assert first is not None
    assert second is not None
    first.cancel()
    async with asyncio.timeout(10):
        await second


async def test_write_that_never_ends_delays_no_other():
    pace = WritePace(most=1)
    assert pace.turn() is None, "this write ends never: its peer does not read"
    async with asyncio.timeout(10):
        for _ in range(3):
            turn = pace.turn()
            if turn is not None:
                await turn


async def test_streams_of_a_run_share_a_pace():
    paces = WritePaces(most=1)
    one, same, other = paces.of("job"), paces.of("job"), paces.of("another")
    assert one.turn() is None
    assert same.turn() is not None
    assert other.turn() is None
