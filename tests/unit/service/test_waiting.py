"""The first of several things ends the wait, and the others."""

import asyncio

from lab.patience import PATIENCE
from muster.service.waiting import first


async def test_first_ends_the_wait_and_the_others():
    one, other = asyncio.Event(), asyncio.Event()
    ended = asyncio.Event()

    async def waits() -> None:
        try:
            await other.wait()
        finally:
            ended.set()

    one.set()
    async with asyncio.timeout(PATIENCE):
        await first(one.wait(), waits())
        await ended.wait()
    assert not other.is_set()


async def test_cancelled_wait_cancels_all_awaitables():
    waiting = asyncio.create_task(first(asyncio.Event().wait(), asyncio.Event().wait()))
    await asyncio.sleep(0)
    before = len(asyncio.all_tasks())
    waiting.cancel()
    await asyncio.wait([waiting])
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) < before
