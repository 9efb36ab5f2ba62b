"""All calls but sessions: handed on as they are, over the relay's one connection.

Nothing is answered here, for the store, the rendezvous and the runs are the coordinator's.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from muster.client.calls import ELSEWHERE, explain, reason_of, search_on
from muster.client.credentials import TOKEN_REFUSED
from muster.client.errors import EnvironmentValueError
from muster.client.replicas import Search
from muster.relay import refusals, status
from muster.relay.counts import Counts
from muster.relay.door import Door, Visitor
from muster.relay.upstream import Upstream
from muster.serving.budget import SMALL, ByteBudget
from muster.serving.connections import address_of
from muster.serving.ending import ended
from muster.serving.options import READ_TIMEOUT
from muster.serving.writes import Writes
from muster.v1 import store_pb2

REPEATED = ("/muster.v1.StoreService/", "/muster.v1.RendezvousService/")
"""Calls that may be sent again though the coordinator may have carried them out."""
CHANGES: dict[str, type[Message]] = {
    f"/{service.full_name}/{method.name}": GetMessageClass(method.input_type)
    for service in [store_pb2.DESCRIPTOR.services_by_name["StoreService"]]
    for method in service.methods
    if "operation" in method.input_type.fields_by_name
}
"""Those of them that the coordinator knows again only by their operation's id, which may be left out."""
DIALOGUES = frozenset({"/muster.v1.StoreService/Operate"})
"""Calls of which each answer is followed by a request; of all others there is but one."""
PASSED = "/muster.v1."
MAX_UNREAD_BYTES = 64 << 20
"""Of all answers that callers do not read: each is in the relay's memory until then."""
MAX_UNREAD_BYTES_PER_ADDRESS = 32 << 20
"""The same, of the callers at one address."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One from below."""

    method: str
    visitor: Visitor
    context: Any

    async def read_first(self) -> bytes | None:
        """As :meth:`read`, within ``READ_TIMEOUT``.

        Raises:
            Refused: it may not be passed on, or has not come.
        """
        try:
            return await self.read(READ_TIMEOUT)
        except TimeoutError:
            why = f"it must come within {READ_TIMEOUT:g} s"
            raise refusals.invalid("request", "not whole", why) from None

    async def read(self, within: float | None = None) -> bytes | None:
        """The next request; None: there are no more.

        Raises:
            Refused: it may not be passed on.
            TimeoutError: it has not come within so many seconds.
        """

        async def read() -> Any:
            async with asyncio.timeout(within):
                return await self.context.read()

        request = await self.visitor.paced(read)()
        if request is grpc.aio.EOF:
            return None
        self.visitor.check_request(self.method, request)
        return bytes(request)


class Passing(grpc.GenericRpcHandler):
    """Hands calls on.

    Args:
        upstream: the connection.
        door: who may call what.
        counts: what is measured.
        writes: writes to callers.
    """

    def __init__(self, upstream: Upstream, door: Door, counts: Counts, writes: Writes) -> None:
        self._upstream = upstream
        self._door = door
        self._counts = counts
        self._writes = writes
        self._unread = ByteBudget(MAX_UNREAD_BYTES, MAX_UNREAD_BYTES_PER_ADDRESS)
        self._pauses: dict[Any, asyncio.Timeout] = {}
        """By the call upward, of the dialogues in which the coordinator has answered, and nothing has come
        since."""
        self._draining = False

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """See ``grpc.GenericRpcHandler``: bytes both ways, and any number of answers."""
        method = handler_call_details.method
        if not method.startswith(PASSED):
            return None

        async def call(_: object, context: Any) -> None:
            try:
                async with self._door.admitted(
                    method, context.invocation_metadata() or (), context.peer()
                ) as visitor:
                    made = _Call(method, visitor, context)
                    if (request := await made.read_first()) is not None:
                        await self._pass(made, request)
            except refusals.Refused as refused:
                await status.end_with(refused.refusal, context)

        return grpc.stream_stream_rpc_method_handler(call)

    async def _pass(self, call: _Call, request: bytes) -> None:
        self._counts.calls += 1
        search = Search(self._upstream.replicas)
        loop = asyncio.get_running_loop()
        until = 0.0
        while True:
            try:
                await self._hand_on(call, request, search)
                return
            except grpc.aio.AioRpcError as error:
                after = await asyncio.to_thread(self._after, error, search, call.method, request)
                if after is None:
                    await _abort_as(error, call.context)
                    return
                pause = after
            except EnvironmentValueError as unusable:
                pause = search.again(str(unusable))
            # A call that has waited for long has its time anew when the coordinator goes.
            until = until or loop.time() + self._upstream.hold
            if loop.time() + pause >= until:
                self._upstream.cut_off(search.said)
                await status.end_with(refusals.cut_off(search.said), call.context)
                return
            await asyncio.sleep(pause)

    async def _hand_on(self, call: _Call, request: bytes, search: Search) -> None:
        target = search.begin()
        metadata = await self._upstream.metadata(search, target)
        async with self._upstream.channel(target) as channel:
            talks, timeout = call.method in DIALOGUES, call.context.time_remaining()
            make: Any = channel.stream_stream(call.method) if talks else channel.unary_stream(call.method)
            upward = make(*() if talks else (request,), timeout=timeout, metadata=metadata)
            answered = False
            try:
                if talks:
                    upward.add_done_callback(self._end_pause)
                    await _say(upward, request)
                while (answer := [await upward.read()]) != [grpc.aio.EOF]:
                    if not answered:
                        answered = True
                        self._answered(search)
                    await self._answer(call.context, answer)
                    if talks and not await self._go_on(call, upward):
                        return
            except grpc.aio.AioRpcError as error:
                if not answered:
                    raise
                await _break_off(error, search, call.context)
            finally:
                upward.cancel()

    async def _answer(self, context: Any, answer: list[bytes]) -> None:
        """Write an answer to its caller.

        Args:
            context: of the call.
            answer: the answer alone. It is taken out: a refusal knows this frame, and lives on for a while.

        Raises:
            Refused: SLOW_CONSUMER.
        """
        size, peer = len(answer[0]), context.peer()
        if size <= SMALL:
            await context.write(answer.pop())
            return
        address = address_of(peer)
        if not self._unread.has_room(size, address):
            answer.clear()
            raise refusals.unread(self._unread.held(address))
        with self._unread.hold(size, address):
            await self._writes.write(context, size, answer.pop, lambda: peer)

    async def _go_on(self, call: _Call, upward: Any) -> bool:
        """Hand the next request of a dialogue on; whether there was one."""
        if self._draining or upward.done():
            return False
        try:
            async with asyncio.timeout(None) as pause:
                self._pauses[upward] = pause
                try:
                    request = await call.read()
                finally:
                    del self._pauses[upward]
        except TimeoutError:
            return False
        if request is None:
            return False
        await _say(upward, request)
        return True

    def drain(self) -> None:
        """End each dialogue once nothing is under way in it; its caller opens another elsewhere."""
        self._draining = True
        for upward in list(self._pauses):
            self._end_pause(upward)

    def _end_pause(self, upward: Any) -> None:
        """The coordinator has ended a dialogue, or it is to be ended: who waits for its caller need not."""
        pause = self._pauses.get(upward)
        if pause is not None and not pause.expired():
            pause.reschedule(0)

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
        silent = error.code() is grpc.StatusCode.UNAVAILABLE or (
            # What grpc.aio makes of a dialogue that was ended, by whatever word, while we wrote to it.
            error.code() is grpc.StatusCode.INTERNAL and method in DIALOGUES
        )
        return pause if silent and _may_be_repeated(method, request) else None


async def _say(upward: Any, request: bytes) -> None:
    """Go on with a dialogue; if the coordinator has ended it, reading says how."""
    with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
        await upward.write(request)


async def _break_off(error: grpc.aio.AioRpcError, search: Search, context: Any) -> None:
    """End a call that was answered in part, so that only its caller can make it again."""
    reason = reason_of(error)
    # The token that was taken away is this relay's, which reads its file anew.
    own_word = bool(reason) and reason not in ELSEWHERE | TOKEN_REFUSED
    if own_word or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        await _abort_as(error, context)
        return
    # As it is, the error would speak against this relay, which goes on. What it says is for our own search.
    await asyncio.to_thread(search_on, search, error)
    await status.end_with(refusals.upstream_lost(explain(error)), context)


async def _abort_as(error: grpc.aio.AioRpcError, context: Any) -> None:
    """End a call as the coordinator has ended ours."""
    await ended(context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ())))


def _may_be_repeated(method: str, request: bytes) -> bool:
    """Whether the coordinator knows a call again that it may have carried out."""
    change = CHANGES.get(method)
    if change is None:
        return method.startswith(REPEATED)
    try:
        return bool(change.FromString(request).HasField("operation"))
    except DecodeError:
        return False
