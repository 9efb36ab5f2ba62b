"""Answers wait for their places in memory, and a reader that does not read is refused by name."""

import asyncio

import pytest

from muster.service.core.vocabulary.refusal import Refusal
from muster.service.rpc.interceptors.unsent import PLACE_TIMEOUT, Answers
from tests.support.world.virtual_time import START, in_virtual_time


async def test_answers_of_an_address_that_does_not_read_are_bounded():
    answers = Answers(most=100, most_of_one=80)
    async with answers.place(50, "10.0.0.7", "ci at 10.0.0.7"):
        with pytest.raises(Refusal, match=r"answers of 50 bytes were waiting for ci at 10\.0\.0\.7 to read"):
            async with answers.place(50, "10.0.0.7", "ci at 10.0.0.7"):
                raise AssertionError("it was written")
        async with (
            answers.place(30, "10.0.0.7", "ci"),
            # An address that holds none has one at least.
            answers.place(90, "10.0.0.8", "cd"),
        ):
            pass
    assert not answers._budget._held


@in_virtual_time
async def test_answers_that_are_unmade_wait_for_their_places_in_their_order():
    answers = Answers(most=100, most_of_one=80)
    written: list[tuple[str, int]] = []

    async def write(address: str, number: int) -> None:
        async with answers.place(50, address, address, waits=True):
            await asyncio.sleep(PLACE_TIMEOUT / 2)
            written.append((address, number))

    await asyncio.gather(*(write("10.0.0.7", number) for number in range(4)), write("10.0.0.8", 0))
    assert written == [("10.0.0.7", 0), ("10.0.0.8", 0), *(("10.0.0.7", number) for number in (1, 2, 3))]
    assert (len(answers._budget._held), len(answers._turns)) == (0, 0)


@in_virtual_time
async def test_answer_that_finds_no_place_in_time_is_refused():
    answers = Answers(most=100, most_of_one=80)
    async with answers.place(50, "10.0.0.7", "ci"):
        with pytest.raises(Refusal, match="answers of 50 bytes were waiting for ci to read"):
            async with answers.place(50, "10.0.0.7", "ci", waits=True):
                raise AssertionError("it was written")
    assert asyncio.get_running_loop().time() == START + PLACE_TIMEOUT
