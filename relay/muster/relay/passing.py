"""All calls but sessions: handed on as they are, over the relay's one connection.

Nothing is answered here, for the store, the rendezvous and the runs are the coordinator's.
"""

import asyncio
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from muster.client.calls import ELSEWHERE, explain, reason_of, search_on
from muster.client.errors import EnvironmentValueError
from muster.client.replicas import Search
from muster.relay import refusals, status
from muster.relay.counts import Counts
from muster.relay.door import Door
from muster.relay.upstream import Upstream
from muster.v1 import store_pb2

REPEATED = ("/muster.v1.StoreService/", "/muster.v1.RendezvousService/")
"""Calls that may be sent again though the coordinator may have carried them out."""
CHANGES: dict[str, type[Message]] = {
    f"/{service.full_name}/{method.name}": GetMessageClass(method.input_type)
    for service in [store_pb2.DESCRIPTOR.services_by_name["StoreService"]]
    for method in service.methods
    if "operation" in method.input_type.fields_by_name
}
"""Those of them that the coordinator knows again only by their operation's id."""
PASSED = "/muster.v1."


class Passing(grpc.GenericRpcHandler):
    """Hands calls on.

    Args:
        upstream: the connection.
        door: who may call what.
        counts: what is measured.
    """

    def __init__(self, upstream: Upstream, door: Door, counts: Counts) -> None:
        self._upstream = upstream
        self._door = door
        self._counts = counts

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """See ``grpc.GenericRpcHandler``: bytes both ways, one request and any number of answers."""
        method = handler_call_details.method
        if not method.startswith(PASSED):
            return None

        async def call(_: object, context: Any) -> None:
            try:
                async with self._door.admitted(method, context.invocation_metadata() or ()) as visitor:
                    request = await context.read()
                    if request is not grpc.aio.EOF:
                        visitor.check_request(method, request)
                        await self._pass(method, request, context)
            except refusals.Refused as refused:
                await context.abort_with_status(status.of(refused.refusal))

        return grpc.stream_stream_rpc_method_handler(call)

    async def _pass(self, method: str, request: bytes, context: Any) -> None:
        self._counts.calls += 1
        search = Search(self._upstream.replicas)
        loop = asyncio.get_running_loop()
        until = 0.0
        while True:
            try:
                await self._hand_on(method, request, context, search)
                return
            except grpc.aio.AioRpcError as error:
                after = await asyncio.to_thread(self._after, error, search, method, request)
                if after is None:
                    await _abort_as(error, context)
                    return
                pause = after
            except EnvironmentValueError as unusable:
                pause = search.again(str(unusable))
            # A call that has waited for long has its time anew when the coordinator goes.
            until = until or loop.time() + self._upstream.hold
            if loop.time() + pause >= until:
                self._upstream.cut_off(search.said)
                await context.abort_with_status(status.of(refusals.cut_off(search.said)))
            await asyncio.sleep(pause)

    async def _hand_on(self, method: str, request: bytes, context: Any, search: Search) -> None:
        target = search.begin()
        metadata = self._upstream.metadata(search, target)
        async with self._upstream.channel(target) as channel:
            make: Any = channel.unary_stream(method)
            call = make(request, timeout=context.time_remaining(), metadata=metadata)
            try:
                answered = False
                while (data := await call.read()) is not grpc.aio.EOF:
                    if not answered:
                        answered = True
                        self._answered(search)
                    await context.write(data)
            except grpc.aio.AioRpcError as error:
                if answered:
                    await _break_off(error, search, context)
                raise
            finally:
                call.cancel()

    def _answered(self, search: Search) -> None:
        """The coordinator has spoken."""
        search.answered()
        self._counts.connected = True

    def _after(
        self, error: grpc.aio.AioRpcError, search: Search, method: str, request: bytes
    ) -> float | None:
        """Seconds to wait before the call is made again; None: its failure is the caller's answer."""
        reason = reason_of(error)
        if reason in ELSEWHERE:
            return search_on(search, error)
        if reason:
            self._answered(search)
            return None
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            search.ran_out(explain(error))  # The caller's own time was over.
            return None
        pause = search_on(search, error)
        silent = error.code() is grpc.StatusCode.UNAVAILABLE
        return pause if silent and _may_be_repeated(method, request) else None


async def _break_off(error: grpc.aio.AioRpcError, search: Search, context: Any) -> None:
    """End a call that was answered in part, so that only its caller can make it again."""
    reason = reason_of(error)
    own_word = bool(reason) and reason not in ELSEWHERE
    if own_word or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        await _abort_as(error, context)
        return
    # As it is, the error would speak against this relay, which goes on. What it says is for our own search.
    await asyncio.to_thread(search_on, search, error)
    await context.abort_with_status(status.of(refusals.upstream_lost(explain(error))))


async def _abort_as(error: grpc.aio.AioRpcError, context: Any) -> None:
    """End a call as the coordinator has ended ours."""
    await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))


def _may_be_repeated(method: str, request: bytes) -> bool:
    """Whether the coordinator knows a call again that it may have carried out."""
    change = CHANGES.get(method)
    if change is None:
        return method.startswith(REPEATED)
    try:
        return bool(change.FromString(request).HasField("operation"))
    except DecodeError:
        return False
