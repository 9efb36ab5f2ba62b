"""StoreService: the keys of a run, with the operations of torch's stores."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from muster.service.core.vocabulary import operations as ops
from muster.service.core.vocabulary.events import StoreRequest
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.draining import DRAINING
from muster.service.driver import Driver
from muster.service.rpc import codec
from muster.service.rpc.call import Call, LongPolls
from muster.service.rpc.interceptors.guard import ADMISSION
from muster.v1 import store_pb2 as pb
from muster.v1 import store_pb2_grpc

T = TypeVar("T")
Change: TypeAlias = pb.SetRequest | pb.AddRequest | pb.CompareSetRequest | pb.AppendRequest | pb.DeleteRequest
IDLE = 5.0
"""Seconds without an operation after which a stream ends: an open stream costs as much as a session."""


class StoreServicer(store_pb2_grpc.StoreServiceServicer):
    """Serves ``muster.v1.StoreService``."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._polls = LongPolls(driver)
        self._calls: Mapping[str, Callable[[Any, Any], Awaitable[Any]]] = {
            "set": self.Set,
            "get": self.Get,
            "wait": self.Wait,
            "check": self.Check,
            "add": self.Add,
            "compare_set": self.CompareSet,
            "append": self.Append,
            "delete": self.Delete,
            "delete_prefix": self.DeletePrefix,
            "list_keys": self.ListKeys,
            "num_keys": self.NumKeys,
        }
        """The method of each operation of a stream."""
        self._pauses: set[asyncio.Timeout] = set()
        """The timeouts of streams that wait for an operation."""
        self._draining = False

    async def Set(self, request: pb.SetRequest, context: Any) -> pb.SetResponse:  # noqa: N802
        """Write keys."""
        entries = tuple((one.key, one.value) for one in codec.at_most("entries", request.entries))
        await self._ask(request.run_id, ops.Set(entries, _id(request)), ops.Done)
        return pb.SetResponse()

    async def Get(  # noqa: N802
        self, request: pb.StoreServiceGetRequest, context: Any
    ) -> pb.StoreServiceGetResponse:
        """Wait for keys, and read them."""
        keys = codec.at_most("keys", request.keys)
        found = await self._wait(request.run_id, ops.Get(keys, request.timeout_ms / 1000), ops.Values)
        ADMISSION.get().check_place(sum(map(len, found.values)))
        return pb.StoreServiceGetResponse(values=found.values)

    async def Wait(self, request: pb.WaitRequest, context: Any) -> pb.WaitResponse:  # noqa: N802
        """Wait for keys."""
        keys = codec.at_most("keys", request.keys)
        await self._wait(request.run_id, ops.Wait(keys, request.timeout_ms / 1000), ops.Done)
        return pb.WaitResponse()

    async def Check(self, request: pb.CheckRequest, context: Any) -> pb.CheckResponse:  # noqa: N802
        """Return whether keys exist."""
        keys = codec.at_most("keys", request.keys)
        present = await self._ask(request.run_id, ops.Check(keys), ops.Flag)
        return pb.CheckResponse(present=present.value)

    async def Add(self, request: pb.AddRequest, context: Any) -> pb.AddResponse:  # noqa: N802
        """Add to a number."""
        operation = ops.Add(request.key, request.amount, _id(request))
        return pb.AddResponse(value=(await self._ask(request.run_id, operation, ops.Number)).value)

    async def CompareSet(  # noqa: N802
        self, request: pb.CompareSetRequest, context: Any
    ) -> pb.CompareSetResponse:
        """Write a key over an expected value."""
        operation = ops.CompareSet(request.key, request.expected, request.desired, _id(request))
        return pb.CompareSetResponse(value=(await self._ask(request.run_id, operation, ops.Value)).value)

    async def Append(self, request: pb.AppendRequest, context: Any) -> pb.AppendResponse:  # noqa: N802
        """Append to a value."""
        await self._ask(request.run_id, ops.Append(request.key, request.value, _id(request)), ops.Done)
        return pb.AppendResponse()

    async def Delete(self, request: pb.DeleteRequest, context: Any) -> pb.DeleteResponse:  # noqa: N802
        """Remove a key."""
        existed = await self._ask(request.run_id, ops.Delete(request.key, _id(request)), ops.Flag)
        return pb.DeleteResponse(existed=existed.value)

    async def DeletePrefix(  # noqa: N802
        self, request: pb.DeletePrefixRequest, context: Any
    ) -> pb.DeletePrefixResponse:
        """Remove all keys with a prefix."""
        count = await self._ask(request.run_id, ops.DeletePrefix(request.prefix), ops.Number)
        return pb.DeletePrefixResponse(count=count.value)

    async def ListKeys(self, request: pb.ListKeysRequest, context: Any) -> pb.ListKeysResponse:  # noqa: N802
        """List all keys."""
        found = await self._ask(request.run_id, ops.ListKeys(), ops.Keys)
        return pb.ListKeysResponse(keys=found.keys)

    async def NumKeys(self, request: pb.NumKeysRequest, context: Any) -> pb.NumKeysResponse:  # noqa: N802
        """Count the keys."""
        count = await self._ask(request.run_id, ops.NumKeys(), ops.Number)
        return pb.NumKeysResponse(count=count.value)

    async def Operate(  # noqa: N802
        self, requests: AsyncIterator[pb.OperateRequest], context: Any
    ) -> AsyncIterator[pb.OperateResponse]:
        """Carry out one operation after another."""
        while (request := await self._next(requests)) is not None:
            name = request.WhichOneof("operation")
            if name is None:
                raise Refusal(
                    Reason.INVALID_ARGUMENT,
                    "an operation came that names nothing to do, or what this version does not know. Name "
                    "one of those in docs/protocol.md.",
                    field="operation",
                )
            operation = getattr(request, name)
            if isinstance(operation, Change) and _id(operation) is None:
                raise Refusal(
                    Reason.INVALID_ARGUMENT,
                    f"{name} came on a stream without an OperationId: a change that was lost could not be "
                    f"sent again. Give it one, or call StoreService.{type(operation).__name__[:-7]}.",
                    field="operation",
                )
            answer = [pb.OperateResponse(**{name: await self._calls[name](operation, context)})]
            del request, operation
            yield answer.pop()  # This frame keeps neither while it waits for the next.

    async def _next(self, requests: AsyncIterator[pb.OperateRequest]) -> pb.OperateRequest | None:
        """Return the next request; None: the stream has been idle or was closed."""
        if self._draining:
            raise DRAINING
        try:
            async with asyncio.timeout(IDLE) as pause:
                self._pauses.add(pause)
                try:
                    return await anext(requests, None)
                finally:
                    self._pauses.discard(pause)
        except TimeoutError:
            return None

    async def _ask(self, run_id: str, operation: ops.Operation, kind: type[T]) -> T:
        with Call(self._driver, kind) as call:
            self._driver.submit(StoreRequest(call.id, run_id, operation))
            return await call.answer()

    async def _wait(self, run_id: str, operation: ops.Waiting, kind: type[T]) -> T:
        with self._polls.open(kind) as call:
            self._driver.submit(StoreRequest(call.id, run_id, operation))
            return await call.answer()

    def drain(self) -> None:
        """End every stream after its current operation, and every call that waits for keys."""
        self._draining = True
        for pause in self._pauses:
            pause.reschedule(0)
        self._polls.drain()


def _id(request: Change) -> ops.OperationId | None:
    if not request.HasField("operation"):
        return None
    return ops.OperationId(request.operation.client, request.operation.number)
