"""Before every call: its peer's rate, its caller's token and role, and the run that it is about.

Only there when something of that was asked for, so that it costs nothing otherwise.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from muster.service.core.refusal import Reason, Refusal
from muster.service.rpc.interceptor import Continuation, Parse, parsed
from muster.service.security import access
from muster.service.security.access import Access
from muster.service.security.tokens import Grant
from muster.service.security.traffic import Traffic, address_of

MOST_WAIT = 10.0
"""Seconds that a call whose request is in memory may wait for its turn; streams wait at the sender."""
MOST_OPEN_BYTES = 4_096
"""Of a request to a method that needs no token."""

T = TypeVar("T")
Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class Admission:
    """As whom, and at which rate, a call was let in."""

    grant: Grant | None = None
    """None: everyone may do everything."""
    traffic: Traffic | None = None
    peer: str = ""

    def check_run(self, run_id: str) -> None:
        """See that a run is among those that the caller may touch.

        Raises:
            Refusal: RUN_NOT_ALLOWED.
        """
        if self.grant is not None:
            access.check_run(self.grant, run_id)

    def paced(self, read: Callable[[], Awaitable[T]]) -> Callable[[], Awaitable[T]]:
        """A stream's ``read`` at the rate of its peer; without bounds it is ``read`` itself."""
        return read if self.traffic is None else self.traffic.paced(self.peer, read)


ADMISSION: ContextVar[Admission] = ContextVar("admission", default=Admission())  # noqa: B039  # frozen
"""Of the call that the current task handles: for handlers that tell it, or whose run is named later."""


class GuardInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls in, or refuses them before any state is touched.

    It stands inside of the interceptor that turns refusals into statuses and counts calls.

    Args:
        guard: checks tokens; None: none are asked for.
        traffic: the bounds of peers.
    """

    def __init__(self, guard: Access | None, traffic: Traffic) -> None:
        self._guard = guard
        self._traffic = traffic

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """See ``grpc.aio.ServerInterceptor``."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        call = _Guarded(
            self._guard,
            self._traffic,
            method in access.OPEN_METHODS,
            method,
            handler_call_details.invocation_metadata or (),
            handler.request_deserializer,
        )
        serializer = handler.response_serializer
        # Requests are parsed here, once their callers are known.
        if handler.unary_unary:
            unary = call.unary(handler.unary_unary)
            return grpc.unary_unary_rpc_method_handler(unary, response_serializer=serializer)
        if handler.unary_stream:
            stream = call.stream(handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(stream, response_serializer=serializer)
        if call.parse is None:
            return grpc.stream_stream_rpc_method_handler(call.session(handler.stream_stream))
        reflection = call.reflection(handler.stream_stream)
        return grpc.stream_stream_rpc_method_handler(reflection, call.parse, serializer)


@dataclass(frozen=True, slots=True)
class _Guarded:
    """One call, and the handlers that let it in first."""

    guard: Access | None
    traffic: Traffic
    is_open: bool
    """It needs no token: it is bounded in size, and takes nothing from the rate of those who have one."""
    method: str
    metadata: Metadata
    parse: Parse | None

    @asynccontextmanager
    async def _admitted(self, context: Any, request: Any = None) -> AsyncIterator[Admission]:
        """Let a call in. Whose request is in memory already is not kept waiting for long."""
        peer = address_of(context.peer())
        most_wait = None if request is None else MOST_WAIT
        self._check_size(request)
        # The token first: who has none waits for nothing, and holds nothing in memory meanwhile.
        async with self._granted() as grant:
            await self.traffic.pace_peer(peer, most_wait)
            if not self.is_open:
                await self.traffic.pace_all(most_wait)
            admission = Admission(grant, self.traffic, peer)
            ADMISSION.set(admission)
            yield admission

    def _check_size(self, request: Any) -> None:
        size = len(request or b"")
        if self.is_open and size > MOST_OPEN_BYTES:
            raise Refusal(
                Reason.INVALID_ARGUMENT,
                f"a request of {size:,} bytes: {self.method} takes {MOST_OPEN_BYTES:,}. Say less.",
            )

    @asynccontextmanager
    async def _granted(self) -> AsyncIterator[Grant | None]:
        if self.guard is None or self.is_open:
            yield None
            return
        grant = self.guard.admit(self.method, self.metadata)
        async with self.guard.while_granted(grant):
            yield grant

    @property
    def _rule(self) -> access.Rule:
        return access.RULES.get(self.method, access.OPERATES)

    def _request(self, admission: Admission, data: Any) -> Any:
        request = parsed(self.parse, data, self.method)
        if admission.grant is not None:
            access.check_request(admission.grant, self._rule, request)
        return request

    def _response(self, admission: Admission, response: Any) -> Any:
        return response if admission.grant is None else access.narrowed(admission.grant, self._rule, response)

    def unary(self, behavior: Any) -> Any:
        async def call(data: Any, context: Any) -> Any:
            async with self._admitted(context, data) as admission:
                request = self._request(admission, data)
                return self._response(admission, await behavior(request, context))

        return call

    def stream(self, behavior: Any) -> Any:
        async def call(data: Any, context: Any) -> AsyncIterator[Any]:
            with self.traffic.stream(address_of(context.peer())):
                async with self._admitted(context, data) as admission:
                    async for response in behavior(self._request(admission, data), context):
                        shown = self._response(admission, response)
                        if shown is not None:
                            yield shown

        return call

    def session(self, behavior: Any) -> Any:
        async def call(requests: Any, context: Any) -> None:
            with self.traffic.stream(address_of(context.peer())):
                async with self._admitted(context):
                    await behavior(requests, context)

        return call

    def reflection(self, behavior: Any) -> Any:
        async def call(requests: Any, context: Any) -> AsyncIterator[Any]:
            with self.traffic.stream(address_of(context.peer())):
                async with self._admitted(context) as admission:
                    read = admission.paced(lambda: anext(requests))
                    async for response in behavior(_each(read), context):
                        yield response

        return call


async def _each(read: Callable[[], Awaitable[T]]) -> AsyncIterator[T]:
    with suppress(StopAsyncIteration):
        while True:
            yield await read()
