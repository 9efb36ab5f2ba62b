"""The turns of joins, without a session."""

import asyncio

import pytest

from muster.service.rpc.join_turns import MIN_WEIGHT, JoinTurns


async def test_join_that_is_cancelled_after_its_grant_gives_its_ranks_back():
    turns = JoinTurns(max_ranks=MIN_WEIGHT)
    first, second, third = (turns.of("job") for _ in range(3))
    await first.begin(1)
    waiting = asyncio.create_task(second.begin(1))
    await asyncio.sleep(0)
    first.end()  # It grants the second join. The task of that join has not run yet.
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(10):
        await third.begin(1)


async def test_end_of_a_stream_ends_all_its_joins():
    turns = JoinTurns(max_ranks=2 * MIN_WEIGHT)
    one, other = turns.of("job"), turns.of("job")
    await one.begin(1)
    await one.begin(1)
    one.end_all()
    one.end()
    async with asyncio.timeout(10):
        await other.begin(2 * MIN_WEIGHT)


async def test_join_of_more_ranks_than_the_limit_is_admitted_alone():
    turns = JoinTurns(max_ranks=MIN_WEIGHT)
    large, other = turns.of("job"), turns.of("job")
    await large.begin(10 * MIN_WEIGHT)
    waiting = asyncio.create_task(other.begin(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    large.end()
    async with asyncio.timeout(10):
        await waiting
