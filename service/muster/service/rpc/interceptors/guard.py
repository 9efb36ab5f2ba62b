"""Before every call: its peer's rate, its caller's token and role, and the run that it is about.

Only there when something of that was asked for, so that it costs nothing otherwise.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import grpc

from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.rpc.interceptors.open_reads import OPEN_REQUEST_BYTES, OpenReads
from muster.service.rpc.interceptors.refusals import Continuation, Parse, parsed
from muster.service.rpc.interceptors.unsent import Answers, log_slow_reader
from muster.service.security import access
from muster.service.security.access import Access
from muster.service.security.audit import CALL
from muster.service.security.grants import Grant, Role
from muster.service.security.traffic import Traffic
from muster.serving.budget import SMALL
from muster.serving.connections import address_of
from muster.serving.counted import counted
from muster.serving.options import READ_TIMEOUT
from muster.serving.writes import Writes

SMALL_READ_TIMEOUT = 5.0
"""The same, where requests are small: of callers that have no token, or may only look."""
FEW = 8
"""So many of these are waited for at once, for each token; they may turn out to be large all the same."""
CROWDED_READ_TIMEOUT = 0.2
"""Seconds that one more may take to come. It is here, as a rule, with the begin of the call."""

T = TypeVar("T")
Again: TypeAlias = Callable[[], Awaitable[Any]]
"""Carries out a call that changes nothing once more."""
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

    def shows(self, run_id: str) -> bool:
        """Whether the caller may see a run."""
        return self.grant is None or self.grant.allows(run_id)

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
        self._small_reads: Counter[Grant] = Counter()
        self._open_reads = OpenReads()
        self.answers = Answers()
        self.writes = Writes(log_slow_reader)

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
            self._small_reads,
            self._open_reads,
            self.answers,
            self.writes,
            method,
            handler_call_details.invocation_metadata or (),
            handler.request_deserializer,
            handler.response_serializer,
        )
        # All are streams to gRPC, which would read the request of a unary call before it hands it on.
        if handler.unary_unary:
            return grpc.stream_stream_rpc_method_handler(call.unary(handler.unary_unary))
        if handler.unary_stream:
            return grpc.stream_stream_rpc_method_handler(call.stream(handler.unary_stream))
        talk = call.session if call.parse is None else call.dialogue
        return grpc.stream_stream_rpc_method_handler(talk(handler.stream_stream))


@dataclass(frozen=True, slots=True)
class _Guarded:
    """One call, and the handlers that let it in first."""

    guard: Access | None
    traffic: Traffic
    small_reads: Counter[Grant]
    """Under way, by token."""
    open_reads: OpenReads
    answers: Answers
    writes: Writes
    method: str
    metadata: Metadata
    parse: Parse | None
    serialize: Callable[[Any], bytes] | None

    @property
    def _is_open(self) -> bool:
        """Whether it needs no token; then it takes nothing from the rate of those who have one."""
        return self.method in access.OPEN_METHODS

    @asynccontextmanager
    async def _admitted(self, context: Any) -> AsyncIterator[Admission]:
        """Let a call in. Its request is read after that, so it waits at its sender."""
        peer = address_of(context.peer())
        async with self._granted() as grant:
            await self.traffic.pace_peer(peer)
            if not self._is_open:
                await self.traffic.pace_all()
            admission = Admission(grant, self.traffic, peer)
            ADMISSION.set(admission)
            yield admission

    @asynccontextmanager
    async def _granted(self) -> AsyncIterator[Grant | None]:
        if self.guard is None or self._is_open:
            yield None
            return
        grant = await self.guard.admit(self.method, self.metadata)
        async with self.guard.while_granted(grant):
            yield grant

    @property
    def _rule(self) -> access.Rule:
        return access.RULES.get(self.method, access.OPERATES)

    async def _request(self, admission: Admission, context: Any) -> Any:
        if self._is_open:
            data = await self._read_open(admission.peer, context)
        else:
            data = await self._read(context, admission.grant)
        if data is grpc.aio.EOF:
            raise Refusal(Reason.INVALID_ARGUMENT, f"{self.method} was called without a request. Send one.")
        return self._checked(admission, data)

    async def _read_open(self, address: str, context: Any) -> Any:
        """Read a request of somebody who has no token."""
        async with self.open_reads.turn(address):
            data = await self._read_within(SMALL_READ_TIMEOUT, context)
            if data is grpc.aio.EOF or (size := len(data)) <= OPEN_REQUEST_BYTES:
                return data
            del data  # It would live as long as the exception, which knows this frame.
            self.open_reads.bar(address)
            raise Refusal(
                Reason.INVALID_ARGUMENT,
                f"the request to {self.method} has {size:,} bytes. This call needs no token, and takes "
                f"{OPEN_REQUEST_BYTES:,}: send less.",
            )

    def _checked(self, admission: Admission, data: bytes) -> Any:
        request = parsed(self.parse, data, self.method)
        if admission.grant is not None:
            access.check_request(admission.grant, self._rule, request)
        return request

    async def _read(self, context: Any, grant: Grant | None) -> Any:
        """Read the request, but do not hold what has come of it for long: anyone may begin a large one."""
        if grant is None or self._rule.role is not Role.VIEWER:
            return await self._read_within(READ_TIMEOUT, context)
        seconds = SMALL_READ_TIMEOUT if self.small_reads[grant] < FEW else CROWDED_READ_TIMEOUT
        with counted(self.small_reads, grant):
            return await self._read_within(seconds, context)

    async def _read_within(self, seconds: float, context: Any) -> Any:
        try:
            async with asyncio.timeout(seconds):
                return await context.read()
        except TimeoutError:
            raise Refusal(
                Reason.INVALID_ARGUMENT,
                f"the request to {self.method} did not come within {seconds:g} s. Send it whole.",
            ) from None

    async def _respond(
        self, admission: Admission, response: Any, context: Any, again: Again | None = None
    ) -> None:
        if admission.grant is not None:
            response = access.narrowed(admission.grant, self._rule, response)
        if response is not None and self.serialize is None:
            await context.write(response)
        elif response is not None:
            made = [self._serialized(response)]
            del response  # Its bytes are in memory from here on, and not the response as well.
            await self._write(admission, made, context, again)
        if (call := CALL.get()) is not None:
            call.answer()

    def _serialized(self, response: Any) -> bytes:
        return self.serialize(response) if self.serialize is not None else response

    async def _write(
        self, admission: Admission, made: list[bytes], context: Any, again: Again | None
    ) -> None:
        """Write an answer.

        Args:
            admission: the caller's.
            made: the answer alone. It is taken out: a refusal knows this frame, and lives on for a while.
            context: of the call.
            again: makes the answer again, if that changes nothing.
        """
        size = len(made[0])
        if size <= SMALL:
            await context.write(made.pop())
            return
        caller = f"{admission.grant.name} at {admission.peer}" if admission.grant else admission.peer
        reader = f"{caller} ({self.method})"
        try:
            # A whole job may wait for one key, behind one address. Its answers wait for their places unmade.
            while again is not None and not self.answers.has_place(size, admission.peer):
                made.clear()
                async with self.answers.place(size, admission.peer, reader, waits=True):
                    made.append(self._serialized(await again()))
                    larger, size = len(made[0]) > size, len(made[0])
                    if not larger:
                        await self.writes.write(context, size, made.pop, lambda: reader)
                        return
            async with self.answers.place(size, admission.peer, reader):
                await self.writes.write(context, size, made.pop, lambda: reader)
        finally:
            made.clear()

    def unary(self, behavior: Any) -> Any:
        async def call(_: object, context: Any) -> None:
            async with self._admitted(context) as admission:
                request = await self._request(admission, context)
                again = partial(behavior, request, context) if self.method in access.READS else None
                await self._respond(admission, await behavior(request, context), context, again)

        return call

    def stream(self, behavior: Any) -> Any:
        async def call(_: object, context: Any) -> None:
            with self.traffic.stream(address_of(context.peer())):
                async with self._admitted(context) as admission:
                    async for response in behavior(await self._request(admission, context), context):
                        await self._respond(admission, response, context)

        return call

    def session(self, behavior: Any) -> Any:
        async def call(requests: Any, context: Any) -> None:
            with self.traffic.stream(address_of(context.peer())):
                async with self._admitted(context):
                    await behavior(requests, context)

        return call

    def dialogue(self, behavior: Any) -> Any:
        async def call(_: object, context: Any) -> None:
            with self.traffic.stream(address_of(context.peer()), "dialogue"):
                async with self._admitted(context) as admission:
                    async for response in behavior(self._requests(admission, context), context):
                        await self._respond(admission, response, context)

        return call

    async def _requests(self, admission: Admission, context: Any) -> AsyncIterator[Any]:
        read = admission.paced(context.read)
        while (data := await read()) is not grpc.aio.EOF:
            yield self._checked(admission, data)
