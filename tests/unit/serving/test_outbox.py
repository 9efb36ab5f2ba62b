import asyncio

from muster.serving.outbox import Outbox, Take
from tests.support.expect import some


async def test_room_is_free_after_a_message_is_taken():
    outbox, said = Outbox(), list[bytes]()
    for data in (b"1", b"2"):
        outbox.put(data)
    waits = asyncio.create_task(outbox.room(2))
    await asyncio.sleep(0)
    assert not waits.done()
    goes_on = asyncio.Event()

    async def write(_: int, take: Take) -> None:
        said.append(some(take()))
        await goes_on.wait()

    writer = asyncio.create_task(outbox.write(write))
    await waits
    assert (said, len(outbox)) == ([b"1"], 1)
    goes_on.set()
    outbox.close()
    await writer
    assert said == [b"1", b"2"]


async def test_wait_for_room_ends_when_outbox_is_closed_or_cleared():
    for end in (Outbox.close, Outbox.clear):
        outbox = Outbox()
        outbox.put(b"1")
        waits = asyncio.create_task(outbox.room(1))
        await asyncio.sleep(0)
        assert not waits.done()
        end(outbox)
        await waits


async def test_closed_outbox_writes_what_waits_and_drops_what_comes_later():
    outbox, said = Outbox(), list[bytes]()
    outbox.put(b"shared", b" and own")
    outbox.close()
    outbox.put(b"late")
    assert (outbox.closed, outbox.bytes) == (True, len(b"shared and own"))

    async def write(size: int, take: Take) -> None:
        said.append(some(take()))
        assert size == len(said[-1])

    await outbox.write(write)
    assert (said, outbox.bytes) == ([b"shared and own"], 0)
    assert outbox.take() is None
