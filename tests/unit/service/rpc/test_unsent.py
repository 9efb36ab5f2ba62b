"""Bytes that wait for their readers: counted once, bounded, and the reader that takes none is named."""

import asyncio

import pytest

from muster.service.core.refusal import Reason, Refusal
from muster.service.rpc.unsent import PATIENCE, PLACE_TIMEOUT, SMALL, InFlight, Queued
from tests.support.virtual_time import START, in_virtual_time

LARGE = bytes(SMALL + 1)


def test_message_in_many_outboxes_counts_once():
    queued = Queued(most=2 * len(LARGE))
    for _ in range(3):
        queued.add(LARGE)
    assert (queued.bytes, queued.too_many) == (len(LARGE), False)
    others = [bytes(bytearray(LARGE)) for _ in range(2)]
    for other in others:
        queued.add(other)
    assert queued.too_many
    for data in (*others, LARGE, LARGE, LARGE):
        queued.remove(data)
    assert queued.bytes == 0
    assert not queued._users


def test_small_message_is_not_counted():
    queued = Queued()
    queued.add(bytes(SMALL))
    assert queued.bytes == 0
    queued.remove(bytes(SMALL))


async def stuck(in_flight: InFlight, size: int, reader: str) -> str:
    """Write to a reader that takes nothing: how it ends."""
    with pytest.raises(Refusal) as caught:
        async with in_flight.message(size, lambda: reader):
            await asyncio.Event().wait()
    assert caught.value.reason is Reason.SLOW_CONSUMER
    return caught.value.message


@in_virtual_time
async def test_reader_that_takes_nothing_is_cut_off_by_name_once_others_need_the_room():
    in_flight = InFlight(most=100)
    slow = asyncio.create_task(stuck(in_flight, 60, "run job1, rank 3 on host-a"))
    await asyncio.sleep(3_600)
    assert not slow.done()
    async with in_flight.message(40, lambda: "fast"):
        pass
    async with in_flight.message(60, lambda: "fast"):
        assert "60 bytes were waiting for run job1, rank 3 on host-a to read" in await slow
    assert in_flight._bytes == 0


@in_virtual_time
async def test_message_waits_for_those_before_it_as_long_as_they_are_read():
    in_flight = InFlight(most=100)
    written: list[int] = []

    async def write(number: int) -> None:
        async with in_flight.message(60, lambda: f"reader {number}"):
            await asyncio.sleep(PATIENCE / 2)
            written.append(number)

    await asyncio.gather(*(write(number) for number in range(4)))
    assert written == [0, 1, 2, 3]
    assert asyncio.get_running_loop().time() == START + 2 * PATIENCE


async def test_large_message_is_not_passed_by_smaller_ones_for_ever():
    in_flight = InFlight(most=100)
    written: list[int] = []
    go_on = asyncio.Event()

    async def write(size: int) -> None:
        async with in_flight.message(size, lambda: ""):
            await go_on.wait()
            written.append(size)

    writing = [asyncio.create_task(write(size)) for size in (60, 90, 30)]
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(*writing)
    assert written == [60, 90, 30]


async def test_message_larger_than_all_room_is_written_alone():
    in_flight = InFlight(most=100)
    async with in_flight.message(1_000, lambda: "one"):
        pass


async def test_answers_of_an_address_that_does_not_read_are_bounded():
    in_flight = InFlight(most=1_000, most_answers=100, most_answers_of_one=80)
    async with in_flight.answer(50, "10.0.0.7", "ci at 10.0.0.7"):
        with pytest.raises(Refusal, match=r"answers of 50 bytes were waiting for ci at 10\.0\.0\.7 to read"):
            async with in_flight.answer(50, "10.0.0.7", "ci at 10.0.0.7"):
                raise AssertionError("it was written")
        async with (
            in_flight.answer(30, "10.0.0.7", "ci"),
            # Who holds none has one at least.
            in_flight.answer(90, "10.0.0.8", "cd"),
        ):
            pass
    assert not in_flight._answers


@in_virtual_time
async def test_answers_that_are_unmade_wait_for_their_places_in_their_order():
    in_flight = InFlight(most=1_000, most_answers=100, most_answers_of_one=80)
    written: list[tuple[str, int]] = []

    async def write(address: str, number: int) -> None:
        async with in_flight.answer(50, address, address, waits=True):
            await asyncio.sleep(PATIENCE)
            written.append((address, number))

    await asyncio.gather(*(write("10.0.0.7", number) for number in range(4)), write("10.0.0.8", 0))
    assert written == [("10.0.0.7", 0), ("10.0.0.8", 0), *(("10.0.0.7", number) for number in (1, 2, 3))]
    assert (len(in_flight._answers), len(in_flight._lines)) == (0, 0)


@in_virtual_time
async def test_answer_that_finds_no_place_in_time_is_refused():
    in_flight = InFlight(most=1_000, most_answers=100, most_answers_of_one=80)
    async with in_flight.answer(50, "10.0.0.7", "ci"):
        with pytest.raises(Refusal, match="answers of 50 bytes were waiting for ci to read"):
            async with in_flight.answer(50, "10.0.0.7", "ci", waits=True):
                raise AssertionError("it was written")
    assert asyncio.get_running_loop().time() == START + PLACE_TIMEOUT
