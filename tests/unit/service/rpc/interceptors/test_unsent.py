"""Answers wait for their places in memory, and a reader that does not read is refused by name."""

import asyncio

import pytest

from muster.service.core.vocabulary.refusal import Reason
from muster.service.rpc.interceptors.unsent import PLACE_TIMEOUT, Answers, NoPlace
from tests.support.world.virtual_time import START, in_virtual_time


def test_answers_of_an_address_that_does_not_read_are_bounded():
    answers = Answers(most=100, most_of_one=80)
    with answers.place(50, "10.0.0.7"):
        with pytest.raises(NoPlace) as caught, answers.place(50, "10.0.0.7"):
            raise AssertionError("it was written")
        assert caught.value.size == 50
        refusal = answers.refusal("10.0.0.7", "ci at 10.0.0.7")
        assert refusal.reason is Reason.SLOW_CONSUMER
        assert "answers of 50 bytes were waiting for ci at 10.0.0.7 to read" in str(refusal)
        # An address that holds none has one at least.
        with answers.place(30, "10.0.0.7"), answers.place(90, "10.0.0.8"):
            pass
    assert not answers._budget._held


@in_virtual_time
async def test_answers_that_are_unmade_wait_for_their_places_in_their_order():
    answers = Answers(most=100, most_of_one=80)
    written: list[tuple[str, int]] = []

    async def write(address: str, number: int) -> None:
        assert await answers.until_place(50, address)
        with answers.place(50, address):
            await asyncio.sleep(PLACE_TIMEOUT / 2)
            written.append((address, number))

    await asyncio.gather(*(write("10.0.0.7", number) for number in range(4)), write("10.0.0.8", 0))
    assert written == [("10.0.0.7", 0), ("10.0.0.8", 0), *(("10.0.0.7", number) for number in (1, 2, 3))]
    assert (len(answers._budget._held), len(answers._turns)) == (0, 0)


@in_virtual_time
async def test_answer_waits_for_a_place_for_a_limited_time():
    answers = Answers(most=100, most_of_one=80)
    with answers.place(50, "10.0.0.7"):
        assert not await answers.until_place(50, "10.0.0.7")
    assert asyncio.get_running_loop().time() == START + PLACE_TIMEOUT
