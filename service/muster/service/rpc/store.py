"""StoreService: the keys of a run, with the operations of torch's stores."""

from typing import Any, TypeVar

from muster.service.core import operations as ops
from muster.service.core.events import StoreRequest
from muster.service.driver import Driver
from muster.service.rpc import codec
from muster.service.rpc.call import Call, LongPolls
from muster.v1 import store_pb2 as pb
from muster.v1 import store_pb2_grpc

T = TypeVar("T")


class StoreServicer(store_pb2_grpc.StoreServiceServicer):
    """Serves ``muster.v1.StoreService``."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._polls = LongPolls(driver)

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
        return pb.StoreServiceGetResponse(values=found.values)

    async def Wait(self, request: pb.WaitRequest, context: Any) -> pb.WaitResponse:  # noqa: N802
        """Wait for keys."""
        keys = codec.at_most("keys", request.keys)
        await self._wait(request.run_id, ops.Wait(keys, request.timeout_ms / 1000), ops.Done)
        return pb.WaitResponse()

    async def Check(self, request: pb.CheckRequest, context: Any) -> pb.CheckResponse:  # noqa: N802
        """Look for keys."""
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
        """Remove all keys that begin so."""
        count = await self._ask(request.run_id, ops.DeletePrefix(request.prefix), ops.Number)
        return pb.DeletePrefixResponse(count=count.value)

    async def ListKeys(self, request: pb.ListKeysRequest, context: Any) -> pb.ListKeysResponse:  # noqa: N802
        """Name all keys."""
        found = await self._ask(request.run_id, ops.ListKeys(), ops.Keys)
        return pb.ListKeysResponse(keys=found.keys)

    async def NumKeys(self, request: pb.NumKeysRequest, context: Any) -> pb.NumKeysResponse:  # noqa: N802
        """Count the keys."""
        count = await self._ask(request.run_id, ops.NumKeys(), ops.Number)
        return pb.NumKeysResponse(count=count.value)

    async def _ask(self, run_id: str, operation: ops.Operation, kind: type[T]) -> T:
        with Call(self._driver, kind) as call:
            self._driver.submit(StoreRequest(call.id, run_id, operation))
            return await call.answer()

    async def _wait(self, run_id: str, operation: ops.Waiting, kind: type[T]) -> T:
        with self._polls.open(kind) as call:
            self._driver.submit(StoreRequest(call.id, run_id, operation))
            return await call.answer()

    def drain(self) -> None:
        """End every call that waits for keys; its caller asks again."""
        self._polls.drain()


def _id(
    request: pb.SetRequest | pb.AddRequest | pb.CompareSetRequest | pb.AppendRequest | pb.DeleteRequest,
) -> ops.OperationId | None:
    if not request.HasField("operation"):
        return None
    return ops.OperationId(request.operation.client, request.operation.number)
