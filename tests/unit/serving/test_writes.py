"""Large messages wait for room, and a reader that takes none loses its connection."""

import asyncio
from contextlib import suppress

import pytest

from muster.serving.budget import SMALL
from muster.serving.writes import READER_TIMEOUT, Writes
from tests.support.world.virtual_time import START, in_virtual_time

UNIT = SMALL + 1
"""Bytes of the smallest message that is counted."""


class Call:
    """A call whose caller takes each message after some seconds, or when it is told to."""

    def __init__(self, address: str = "10.0.0.7", *, takes_after: float | None = None) -> None:
        self.taken: list[bytes] = []
        self.takes = asyncio.Event()
        self._takes_after = takes_after
        self._peer = f"ipv4:{address}:{id(self)}"
        self.connected = True

    def peer(self) -> str:
        return self._peer

    async def write(self, message: bytes) -> None:
        if self._takes_after is None:
            await self.takes.wait()
        else:
            await asyncio.sleep(self._takes_after)
        if not self.connected:
            raise ConnectionError
        self.taken.append(message)


class World:
    """A server with room for ``most`` messages of :data:`UNIT` bytes, and its readers."""

    def __init__(self, most: float, most_of_one: float = 1_000) -> None:
        self.slow: list[tuple[str, int]] = []
        self.calls: dict[str, Call] = {}
        self.writes = Writes(self._is_slow, int(most * UNIT), int(most_of_one * UNIT), self._end)
        self.can_end = True

    def _is_slow(self, reader: str, size: int) -> None:
        self.slow.append((reader, size))

    async def _end(self, peer: str) -> bool:
        if self.can_end:
            self.calls[peer].connected = False
            self.calls[peer].takes.set()
        return self.can_end

    def write(self, call: Call, size: int = UNIT, reader: str = "") -> asyncio.Future[None]:
        self.calls[call.peer()] = call
        return asyncio.ensure_future(self.writes.write(call, size, lambda: bytes(size), lambda: reader))


@in_virtual_time
async def test_slow_reader_loses_its_connection_when_others_need_room():
    world = World(most=1)
    stuck = world.write(Call(), reader="run job1, rank 3 on host-a")
    await asyncio.sleep(3_600)
    assert not stuck.done()
    other = Call("10.0.0.8", takes_after=0)
    await world.write(other)
    with pytest.raises(ConnectionError):
        await stuck
    assert world.slow == [("run job1, rank 3 on host-a", UNIT)]
    assert (len(other.taken), world.writes.held) == (1, 0)


@in_virtual_time
async def test_abandoned_write_counts_until_grpc_has_finished_it():
    world = World(most=1)
    call = Call()
    handler = world.write(call)
    await asyncio.sleep(0)
    handler.cancel()
    with suppress(asyncio.CancelledError):
        await handler
    assert world.writes.held == UNIT
    await world.write(Call("10.0.0.8", takes_after=0))
    assert (world.slow, world.writes.held) == ([("", UNIT)], 0)
    assert asyncio.get_running_loop().time() == START + READER_TIMEOUT


@in_virtual_time
async def test_message_waits_while_earlier_ones_are_read():
    world = World(most=1)
    calls = [Call(takes_after=READER_TIMEOUT / 2) for _ in range(4)]
    await asyncio.gather(*map(world.write, calls))
    assert [len(call.taken) for call in calls] == [1] * 4
    assert (world.slow, asyncio.get_running_loop().time()) == ([], START + 2 * READER_TIMEOUT)


@in_virtual_time
async def test_smaller_messages_do_not_overtake_a_large_one_for_ever():
    world = World(most=2)
    calls = [Call(takes_after=1) for _ in range(3)]
    started = [world.write(calls[0]), world.write(calls[1], 2 * UNIT), world.write(calls[2])]
    await started[1]
    assert [len(call.taken) for call in calls] == [1, 1, 0]
    await started[2]


@in_virtual_time
async def test_message_larger_than_the_limit_is_written_alone():
    call = Call(takes_after=0)
    await World(most=1).write(call, 10 * UNIT)
    assert call.taken == [bytes(10 * UNIT)]


@in_virtual_time
async def test_readers_at_one_address_leave_room_for_others():
    world = World(most=2, most_of_one=1)
    held_up = [Call(), Call()]
    stuck = [world.write(call) for call in held_up]
    await asyncio.sleep(0)
    other = Call("10.0.0.8", takes_after=0)
    await world.write(other)
    assert len(other.taken) == 1
    assert asyncio.get_running_loop().time() == START
    # Those at the address need their own room, so the slower of them is ended as well.
    await asyncio.sleep(READER_TIMEOUT)
    await asyncio.sleep(0)
    assert [call.connected for call in held_up] == [False, True]
    held_up[1].takes.set()
    await asyncio.gather(*stuck, return_exceptions=True)
    assert (world.writes.held, len(world.writes._turns)) == (0, 0)


@in_virtual_time
async def test_next_slowest_reader_is_ended_if_the_slowest_cannot_be():
    world = World(most=2)
    world.can_end = False
    calls = [Call(), Call()]
    stuck = [world.write(call, reader=str(number)) for number, call in enumerate(calls)]
    await asyncio.sleep(0)
    waiting = world.write(Call(takes_after=0), 2 * UNIT)
    await asyncio.sleep(2 * READER_TIMEOUT)
    assert [reader for reader, _ in world.slow] == ["0", "1"]
    for call in calls:
        call.takes.set()
    await asyncio.gather(*stuck, waiting)


@in_virtual_time
async def test_small_message_does_not_wait():
    world = World(most=1)
    stuck = world.write(Call())
    await asyncio.sleep(0)
    call = Call(takes_after=0)
    await world.write(call, SMALL)
    assert (call.taken, world.writes.held) == ([bytes(SMALL)], UNIT)
    stuck.cancel()


@in_virtual_time
async def test_withdrawn_message_takes_no_room():
    world, call = World(most=1), Call(takes_after=0)
    for size in (SMALL, UNIT):
        await world.writes.write(call, size, lambda: None, str)
    assert (call.taken, world.writes.held) == ([], 0)
