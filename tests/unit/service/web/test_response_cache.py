"""ResponseCache that are given to many: made once while they are fresh, and one at a time."""

import asyncio

import pytest

from muster.service.storage.engine import StorageError
from muster.service.web.response_cache import FRESH_FOR, CachedResponse, ResponseCache
from tests.support.world.virtual_time import START, in_virtual_time


@in_virtual_time
async def test_an_answer_is_given_again_only_while_it_is_fresh():
    answers = ResponseCache()
    made: list[float] = []

    async def make() -> CachedResponse:
        await asyncio.sleep(5)
        made.append(asyncio.get_running_loop().time())
        return CachedResponse(200, "text/html", b"", b"")

    await asyncio.gather(answers.get("a", make), answers.get("b", make))
    assert made == [START + 5, START + 10], "one at a time"
    await asyncio.sleep(FRESH_FOR / 2)
    await answers.get("b", make)
    assert len(made) == 2
    await asyncio.sleep(FRESH_FOR)
    await answers.get("b", make)
    assert len(made) == 3


@in_virtual_time
async def test_answers_that_take_long_need_not_wait_for_each_other():
    answers = ResponseCache(in_turn=False)
    made: list[float] = []

    async def make() -> CachedResponse:
        await asyncio.sleep(5)
        made.append(asyncio.get_running_loop().time())
        return CachedResponse(200, "text/html", b"", b"")

    await asyncio.gather(*(answers.get(key, make) for key in "aab"))
    assert made == [START + 5] * 2


@in_virtual_time
async def test_an_answer_that_failed_is_made_again():
    answers = ResponseCache()

    async def fail() -> CachedResponse:
        raise StorageError("the disk is full")

    for _ in range(2):
        with pytest.raises(StorageError):
            await answers.get("a", fail)
    await asyncio.sleep(FRESH_FOR * 2)
    with pytest.raises(StorageError):
        await answers.get("a", fail)
