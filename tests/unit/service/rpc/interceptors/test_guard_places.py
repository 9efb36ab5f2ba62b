"""Large answers have places in memory. An answer without one is not made, or not kept."""

import asyncio
import weakref
from typing import Any

import grpc
import pytest

from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.rpc.interceptors.guard import ADMISSION
from muster.service.rpc.interceptors.unsent import Answers
from muster.v1 import store_pb2
from tests.support.world.virtual_time import in_virtual_time
from tests.unit.service.rpc.interceptors.test_guard import Context, World
from tests.unit.service.rpc.interceptors.test_guard_memory import Watched

GET = "/muster.v1.StoreService/Get"
APPEND = "/muster.v1.StoreService/Append"
OPERATE = "/muster.v1.StoreService/Operate"
SIZE = 1_000_000


class Unread(Context):
    """A caller that does not read its answer until the event is set."""

    def __init__(self, data: bytes, reads: asyncio.Event) -> None:
        super().__init__(data)
        self.reads = reads
        self.waits = asyncio.Event()

    async def write(self, response: Any) -> None:
        self.waits.set()
        await self.reads.wait()
        await super().write(response)


class Store:
    """Handlers with answers of 1 MB. There is a place for one answer.

    Args:
        checks: whether the handlers check the place before they make an answer.
    """

    def __init__(self, checks: bool) -> None:
        self.world = World()
        self.world.interceptor.answers = Answers(most_of_one=SIZE + 1)
        self.checks = checks
        self.asked = 0
        self.made: list[weakref.ref[Watched]] = []
        self.reads = asyncio.Event()

    async def _get(self, request: Any, context: Any) -> Any:
        self.asked += 1
        if self.checks:
            ADMISSION.get().check_place(SIZE)
        return store_pb2.StoreServiceGetResponse()

    async def _operate(self, requests: Any, context: Any) -> Any:
        async for request in requests:
            yield await self._get(request, context)

    def _serialize(self, _: object) -> Watched:
        answer = Watched(SIZE)
        self.made.append(weakref.ref(answer))
        return answer

    async def call(self, method: str) -> Unread:
        """Call a method, and return the context once the caller has read the answer."""
        context = self._context(method)
        await self._call(method, context)
        return context

    async def begin(self) -> "asyncio.Task[None]":
        """Begin the first call. Its answer takes the place, and the caller does not read it yet."""
        context = self._context(GET)
        task = asyncio.create_task(self._call(GET, context))
        await context.waits.wait()
        return task

    def _context(self, method: str) -> Unread:
        read = store_pb2.StoreServiceGetRequest(run_id="a-1")
        request = store_pb2.OperateRequest(get=read) if method == OPERATE else read
        return Unread(request.SerializeToString(), self.reads)

    async def _call(self, method: str, context: Unread) -> None:
        serialize: Any = self._serialize
        made: Any
        if method == OPERATE:
            asked = store_pb2.OperateRequest.FromString
            made = grpc.stream_stream_rpc_method_handler(self._operate, asked, serialize)
        else:
            read = store_pb2.StoreServiceGetRequest.FromString
            made = grpc.unary_unary_rpc_method_handler(self._get, read, serialize)
        handler = await self.world.handler(method, made)
        await handler.stream_stream(None, context)


@pytest.mark.parametrize("method", [APPEND, OPERATE])
@pytest.mark.parametrize("checks", [True, False])
async def test_answer_without_a_place_is_refused(method: str, checks: bool):
    store = Store(checks)
    first = await store.begin()
    with pytest.raises(Refusal) as caught:
        await store.call(method)
    assert caught.value.reason is Reason.SLOW_CONSUMER
    assert f"ci at 10.0.0.7 ({method})" in str(caught.value)
    # The refusal keeps the call's frames alive, but not the answer.
    assert [one() for one in store.made[1:]] == ([] if checks else [None])
    store.reads.set()
    await first


@in_virtual_time
async def test_read_without_a_place_is_repeated_once_there_is_one():
    for checks in (True, False):
        store = Store(checks)
        first = await store.begin()
        second = asyncio.create_task(store.call(GET))
        await asyncio.sleep(1)
        assert [one() for one in store.made[1:]] == ([] if checks else [None])
        store.reads.set()
        await first
        assert len((await second).heard) == 1
        assert store.asked == 3
        assert len(store.made) == (2 if checks else 3)


@in_virtual_time
async def test_read_without_a_place_is_refused_after_a_while():
    store = Store(checks=True)
    first = await store.begin()
    with pytest.raises(Refusal) as caught:
        await store.call(GET)
    assert caught.value.reason is Reason.SLOW_CONSUMER
    assert (store.asked, len(store.made)) == (2, 1)
    store.reads.set()
    await first
