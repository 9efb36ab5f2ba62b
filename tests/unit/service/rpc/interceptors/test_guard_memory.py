"""What a call leaves in memory: nothing when it has ended, and no message while it waits."""

import asyncio
import gc
import weakref
from typing import Any

import grpc

from muster.v1 import run_pb2
from tests.unit.service.rpc.interceptors.test_guard import Context, World


def get(run_id: str) -> run_pb2.RunServiceGetRequest:
    return run_pb2.RunServiceGetRequest(run_id=run_id)


async def test_call_leaves_no_garbage():
    world = World()
    gc.disable()
    try:
        task = asyncio.create_task(world.get(get("a-1")))
        await task
        ended = weakref.ref(task)
        del task
        await asyncio.sleep(0)  # The loop's last callback refers to the task.
        assert ended() is None
    finally:
        gc.enable()


class Watched(bytearray):
    """Bytes that can be watched by a weak reference."""


async def test_dialogue_that_waits_keeps_neither_request_nor_answer():
    world = World(role=None)
    seen: list[weakref.ref[Watched]] = []
    waits = asyncio.Event()

    async def behavior(requests: Any, context: Any) -> Any:
        async for request in requests:
            seen.append(weakref.ref(request))
            del request
            answer = [Watched(b"answer")]
            seen.append(weakref.ref(answer[0]))
            yield answer.pop()

    class Waiting(Context):
        async def read(self) -> Any:
            if not self._sent:
                waits.set()
                await asyncio.Event().wait()
            return self._sent.pop(0)

        async def write(self, response: Any) -> None: ...

    made: Any = grpc.stream_stream_rpc_method_handler(behavior, Watched, bytes)
    handler = await world.handler("/muster.v1.StoreService/Operate", made)
    dialogue = asyncio.create_task(handler.stream_stream(None, Waiting(b"request")))
    waiting = asyncio.create_task(waits.wait())
    await asyncio.wait([dialogue, waiting], return_when=asyncio.FIRST_COMPLETED)
    assert not dialogue.done()
    assert [one() for one in seen] == [None, None]
    dialogue.cancel()
