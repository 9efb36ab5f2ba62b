"""Forwards all calls but sessions unchanged, over the relay's one connection.

The relay answers none of them: the coordinator owns the store, the rendezvous and the runs.
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
from muster.relay.authenticator import Authenticator, Caller
from muster.relay.stats import RelayStats
from muster.relay.upstream import Upstream
from muster.serving.budget import SMALL, ByteBudget
from muster.serving.connections import address_of
from muster.serving.ending import ended
from muster.serving.options import READ_TIMEOUT
from muster.serving.writes import Writes
from muster.v1 import store_pb2

REPEATED = (
    "/muster.v1.StoreService/",
    "/muster.v1.RendezvousService/",
    "/muster.v1.LocalCheckpointService/",
)
"""Calls that may be sent again although the coordinator may have carried them out."""
CHANGES: dict[str, type[Message]] = {
    f"/{service.full_name}/{method.name}": GetMessageClass(method.input_type)
    for service in [store_pb2.DESCRIPTOR.services_by_name["StoreService"]]
    for method in service.methods
    if "operation" in method.input_type.fields_by_name
}
"""Repeatable calls that the coordinator recognises by the id of their operation, which is optional."""
DIALOGUES = frozenset({"/muster.v1.StoreService/Operate"})
"""Calls with a request after each answer; all others have one request."""
FORWARDED = "/muster.v1."
MAX_UNREAD_BYTES = 64 << 20
"""Bytes of all unread answers: each stays in the relay's memory until its caller reads it."""
MAX_UNREAD_BYTES_PER_ADDRESS = 32 << 20
"""The same, for the callers at one address."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A call from below."""

    method: str
    caller: Caller
    context: Any

    async def read_first(self) -> bytes | None:
        """Read as :meth:`read`, within ``READ_TIMEOUT``.

        Raises:
            Refused: the caller may not make this call, or the request has not come.
        """
        try:
            return await self.read(READ_TIMEOUT)
        except TimeoutError:
            why = f"it must come within {READ_TIMEOUT:g} s"
            raise refusals.invalid("request", "not whole", why) from None

    async def read(self, within: float | None = None) -> bytes | None:
        """Read the next request; None: there are no more.

        Raises:
            Refused: the caller may not make this call.
            TimeoutError: the request has not come within so many seconds.
        """

        async def read() -> Any:
            async with asyncio.timeout(within):
                return await self.context.read()

        request = await self.caller.paced(read)()
        if request is grpc.aio.EOF:
            return None
        self.caller.check_request(self.method, request)
        return bytes(request)


class CallForwarder(grpc.GenericRpcHandler):
    """Forwards calls.

    Args:
        upstream: the connection.
        authenticator: admits callers.
        stats: what is measured.
        writes: writes to callers.
    """

    def __init__(
        self, upstream: Upstream, authenticator: Authenticator, stats: RelayStats, writes: Writes
    ) -> None:
        self._upstream = upstream
        self._authenticator = authenticator
        self._stats = stats
        self._writes = writes
        self._unread = ByteBudget(MAX_UNREAD_BYTES, MAX_UNREAD_BYTES_PER_ADDRESS)
        self._pauses: dict[Any, asyncio.Timeout] = {}
        """By the call upward: the dialogues that wait for the next request of their caller."""
        self._draining = False

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """See ``grpc.GenericRpcHandler``: bytes both ways, and any number of answers."""
        method = handler_call_details.method
        if not method.startswith(FORWARDED):
            return None

        async def call(_: object, context: Any) -> None:
            try:
                async with self._authenticator.admit(method, context) as caller:
                    made = _Call(method, caller, context)
                    if (request := await made.read_first()) is not None:
                        await self._forward(made, request)
            except refusals.Refused as refused:
                await status.end_with(refused.refusal, context)

        return grpc.stream_stream_rpc_method_handler(call)

    async def _forward(self, call: _Call, request: bytes) -> None:
        self._stats.calls += 1
        search = Search(self._upstream.replicas)
        loop = asyncio.get_running_loop()
        until = 0.0
        while True:
            try:
                await self._attempt(call, request, search)
                return
            except grpc.aio.AioRpcError as error:
                after = await asyncio.to_thread(self._after, error, search, call.method, request)
                if after is None:
                    await _abort_as(error, call.context)
                    return
                pause = after
            except EnvironmentValueError as unusable:
                pause = search.again(str(unusable))
            # The time starts with the first failure: the coordinator may have held the call before.
            until = until or loop.time() + self._upstream.search_time
            if loop.time() + pause >= until:
                self._upstream.cut_off(search.said)
                await status.end_with(refusals.cut_off(search.said), call.context)
                return
            await asyncio.sleep(pause)

    async def _attempt(self, call: _Call, request: bytes, search: Search) -> None:
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
                    await _write(upward, request)
                while (answer := [await upward.read()]) != [grpc.aio.EOF]:
                    if not answered:
                        answered = True
                        self._answered(search)
                    await self._answer(call.context, answer)
                    if talks and not await self._continue(call, upward):
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
            answer: a list of the answer alone. The method empties it: a refusal outlives this frame for a
                while, and would keep the answer in memory.

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

    async def _continue(self, call: _Call, upward: Any) -> bool:
        """Forward the next request of a dialogue; return whether there was one."""
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
        await _write(upward, request)
        return True

    def drain(self) -> None:
        """End each dialogue when its last request is answered; its caller opens another one elsewhere."""
        self._draining = True
        for upward in list(self._pauses):
            self._end_pause(upward)

    def _end_pause(self, upward: Any) -> None:
        """End the wait for the next request of a dialogue, because the dialogue ends."""
        pause = self._pauses.get(upward)
        if pause is not None and not pause.expired():
            pause.reschedule(0)

    def _answered(self, search: Search) -> None:
        """Note that the coordinator has answered."""
        search.answered()
        self._stats.connected = True

    def _after(
        self, error: grpc.aio.AioRpcError, search: Search, method: str, request: bytes
    ) -> float | None:
        """Return the seconds until the call is repeated; None: its failure is the caller's answer."""
        reason = reason_of(error)
        if reason in ELSEWHERE:
            return search_on(search, error)
        if reason:
            self._answered(search)
            return None
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            search.ran_out(explain(error))  # The caller's timeout.
            return None
        pause = search_on(search, error)
        silent = error.code() is grpc.StatusCode.UNAVAILABLE or (
            # grpc.aio's code for a dialogue that ended, with any status, during a write.
            error.code() is grpc.StatusCode.INTERNAL and method in DIALOGUES
        )
        return pause if silent and _may_be_repeated(method, request) else None


async def _write(upward: Any, request: bytes) -> None:
    """Write to a dialogue; if the coordinator has ended it, the next read raises its status."""
    with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
        await upward.write(request)


async def _break_off(error: grpc.aio.AioRpcError, search: Search, context: Any) -> None:
    """End a call that was answered in part: only its caller can repeat it."""
    reason = reason_of(error)
    # A refused token is this relay's own; the relay reads its file again.
    is_answer = bool(reason) and reason not in ELSEWHERE | TOKEN_REFUSED
    if is_answer or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        await _abort_as(error, context)
        return
    # Unchanged, the caller would take the error for one of this relay. It is for the relay's own search.
    await asyncio.to_thread(search_on, search, error)
    await status.end_with(refusals.upstream_lost(explain(error)), context)


async def _abort_as(error: grpc.aio.AioRpcError, context: Any) -> None:
    """End a call with the status of the coordinator."""
    await ended(context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ())))


def _may_be_repeated(method: str, request: bytes) -> bool:
    """Return whether the coordinator would recognise a repeated call."""
    change = CHANGES.get(method)
    if change is None:
        return method.startswith(REPEATED)
    try:
        return bool(change.FromString(request).HasField("operation"))
    except DecodeError:
        return False
