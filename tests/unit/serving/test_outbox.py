import asyncio

from muster.serving.outbox import Outbox, Take
from tests.support.expect import some


async def test_there_is_room_again_when_something_was_said():
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


async def test_who_waits_for_room_goes_on_when_nothing_more_is_said():
    for end in (Outbox.close, Outbox.clear):
        outbox = Outbox()
        outbox.put(b"1")
        waits = asyncio.create_task(outbox.room(1))
        await asyncio.sleep(0)
        assert not waits.done()
        end(outbox)
        await waits
