"""The interceptor that checks every call: the peer's rate, the caller's token and role, and the run.

The server has it only if the settings ask for such a check, so that it costs nothing otherwise.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import grpc

from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.rpc.interceptors.open_reads import OPEN_REQUEST_BYTES, OpenReads
from muster.service.rpc.interceptors.open_reads import READ_TIMEOUT as OPEN_READ_TIMEOUT
from muster.service.rpc.interceptors.refusals import Continuation, Parse, parsed
from muster.service.rpc.interceptors.unsent import Answers, NoPlace, log_slow_reader
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
"""Seconds for small requests, which are those of viewers."""
FEW = 8
"""Small requests of one token that may be awaited at once. They may turn out to be large."""
CROWDED_READ_TIMEOUT = 0.2
"""Seconds for further ones. A request usually arrives with the begin of the call."""

T = TypeVar("T")
Again: TypeAlias = Callable[[], Awaitable[Any]]
"""Repeats a call that changes nothing."""
Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class Admission:
    """The grant and the rate of a call that was admitted."""

    grant: Grant | None = None
    """None: everyone may do everything."""
    traffic: Traffic | None = None
    peer: str = ""
    validity: asyncio.Timeout | None = field(default=None, compare=False)
    """Expires when the caller's token is no longer valid; None: there is no token."""
    answers: Answers | None = field(default=None, compare=False)
    """The limits of unread answers; None: the answer has its place already, or nothing limits it."""

    @property
    def has_ended(self) -> bool:
        """Whether the token is no longer valid, so that the call is cancelled."""
        return self.validity is not None and self.validity.expired()

    def check_run(self, run_id: str) -> None:
        """Check that the caller may touch a run.

        Raises:
            Refusal: RUN_NOT_ALLOWED.
        """
        if self.grant is not None:
            access.check_run(self.grant, run_id)

    def check_place(self, size: int) -> None:
        """Check that an answer may be in memory beside other unread answers. Call it before making it.

        Args:
            size: bytes of the answer's payloads.

        Raises:
            NoPlace: it may not be. The guard refuses the call, or repeats it once there is a place.
        """
        if self.answers is not None and size > SMALL:
            self.answers.check_place(size, self.peer)

    def shows(self, run_id: str) -> bool:
        """Return whether the caller may see a run."""
        return self.grant is None or self.grant.allows(run_id)

    def paced(self, read: Callable[[], Awaitable[T]]) -> Callable[[], Awaitable[T]]:
        """Return a stream's ``read``, slowed down to the rate of its peer."""
        return read if self.traffic is None else self.traffic.paced(self.peer, read)


NOT_ADMITTED = Admission()
ADMISSION: ContextVar[Admission] = ContextVar("admission", default=NOT_ADMITTED)
"""The admission of the current task's call, for handlers that show it or that read the run id later."""


class GuardInterceptor(grpc.aio.ServerInterceptor):
    """Admits calls, or refuses them before they touch any state.

    It runs inside the interceptor that turns refusals into statuses and counts calls.

    Args:
        guard: checks tokens; None: callers need no token.
        traffic: the limits of peers.
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
        # All are streams to gRPC, because it reads the request of a unary call before calling the handler.
        if handler.unary_unary:
            return grpc.stream_stream_rpc_method_handler(call.unary(handler.unary_unary))
        if handler.unary_stream:
            return grpc.stream_stream_rpc_method_handler(call.stream(handler.unary_stream))
        talk = call.session if call.parse is None else call.dialogue
        return grpc.stream_stream_rpc_method_handler(talk(handler.stream_stream))


@dataclass(frozen=True, slots=True)
class _Guarded:
    """One call, and the handlers that admit it first."""

    guard: Access | None
    traffic: Traffic
    small_reads: Counter[Grant]
    """Reads in progress, by token."""
    open_reads: OpenReads
    answers: Answers
    writes: Writes
    method: str
    metadata: Metadata
    parse: Parse | None
    serialize: Callable[[Any], bytes]
    """A session has none, because it writes its messages itself."""

    @property
    def _is_open(self) -> bool:
        """Whether the call needs no token. Then it does not count for the rate of callers with a token."""
        return self.method in access.OPEN_METHODS

    @asynccontextmanager
    async def _admitted(self, context: Any) -> AsyncIterator[Admission]:
        """Admit a call. Its request is read afterwards, and waits at the sender until then."""
        peer = address_of(context.peer())
        async with self._granted() as (grant, validity):
            await self.traffic.pace_peer(peer)
            if not self._is_open:
                await self.traffic.pace_all()
            admission = Admission(grant, self.traffic, peer, validity, self.answers)
            ADMISSION.set(admission)
            try:
                yield admission
            finally:
                # The admission's timeout refers to the call's task, and so to this context.
                ADMISSION.set(NOT_ADMITTED)

    @asynccontextmanager
    async def _granted(self) -> AsyncIterator[tuple[Grant | None, asyncio.Timeout | None]]:
        if self.guard is None or self._is_open:
            yield None, None
            return
        grant = await self.guard.admit(self.method, self.metadata)
        async with self.guard.while_granted(grant) as validity:
            yield grant, validity

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
        """Read the request of a caller without a token."""
        async with self.open_reads.turn(address):
            data = await self._read_within(OPEN_READ_TIMEOUT, context)
            if data is grpc.aio.EOF or (size := len(data)) <= OPEN_REQUEST_BYTES:
                return data
            del data  # The exception refers to this frame, and would keep the data alive.
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
        """Read the request within a time limit, because anyone may begin to send a large one."""
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

    async def _respond(self, admission: Admission, response: Any, context: Any) -> None:
        """Write a response.

        Raises:
            NoPlace: it is large, and there is no place for it in memory beside other unread ones.
        """
        if admission.grant is not None:
            response = access.filtered(admission.grant, self._rule, response)
        if response is not None:
            made = [self.serialize(response)]
            del response  # Do not keep the response in memory beside its bytes.
            if (size := len(made[0])) <= SMALL:
                await context.write(made.pop())
            else:
                with self.answers.place(size, admission.peer):
                    await self._write(admission, made, context)
        _audit_answer()

    async def _or_later(
        self, respond: Awaitable[None], admission: Admission, context: Any, again: Again | None = None
    ) -> None:
        """Respond. If a large response has no place, wait for one, and make the response then.

        A whole job may wait for one key at one address.

        Args:
            respond: writes the responses.
            admission: the caller's.
            context: the call's context.
            again: makes the response again; None: that would change something.

        Raises:
            Refusal: SLOW_CONSUMER: there was no place in time, or the call cannot be repeated.
        """
        try:
            await respond
        except NoPlace as full:
            size = full.size
        else:
            return
        # Outside of the handler, because the exception refers to the frame that holds the answer.
        made: list[bytes] = []
        while again is not None and await self.answers.until_place(size, admission.peer):
            with self.answers.place(size, admission.peer):
                ADMISSION.set(replace(admission, answers=None))
                made.append(self.serialize(await again()))
                if len(made[0]) <= size + SMALL:
                    await self._write(admission, made, context)
                    _audit_answer()
                    return
                size = len(made.pop())
        raise self.answers.refusal(admission.peer, self._reader(admission))

    async def _write(self, admission: Admission, made: list[bytes], context: Any) -> None:
        """Write a large answer that has a place. It leaves its list, because a refusal keeps frames alive."""
        try:
            await self.writes.write(context, len(made[0]), made.pop, lambda: self._reader(admission))
        finally:
            made.clear()

    def _reader(self, admission: Admission) -> str:
        """Return the caller's name, for people."""
        caller = f"{admission.grant.name} at {admission.peer}" if admission.grant else admission.peer
        return f"{caller} ({self.method})"

    def unary(self, behavior: Any) -> Any:
        async def call(_: object, context: Any) -> None:
            async with self._admitted(context) as admission:
                request = await self._request(admission, context)
                ask = partial(behavior, request, context)

                async def respond() -> None:
                    await self._respond(admission, await ask(), context)

                reads = self.method in access.READS
                await self._or_later(respond(), admission, context, ask if reads else None)

        return call

    def stream(self, behavior: Any) -> Any:
        async def call(_: object, context: Any) -> None:
            with self.traffic.stream(address_of(context.peer())):
                async with self._admitted(context) as admission:
                    responses = behavior(await self._request(admission, context), context)
                    await self._or_later(
                        self._respond_each(admission, responses, context), admission, context
                    )

        return call

    async def _respond_each(self, admission: Admission, responses: AsyncIterator[Any], context: Any) -> None:
        async for response in responses:
            answer = [response]
            del response  # Do not keep it in memory beside its bytes, nor until the next one.
            await self._respond(admission, answer.pop(), context)

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
                    responses = behavior(self._requests(admission, context), context)
                    await self._or_later(
                        self._respond_each(admission, responses, context), admission, context
                    )

        return call

    async def _requests(self, admission: Admission, context: Any) -> AsyncIterator[Any]:
        read = admission.paced(context.read)
        while (data := await read()) is not grpc.aio.EOF:
            made = [self._checked(admission, data)]
            del data
            yield made.pop()  # This frame keeps no request while it waits for the next.


def _audit_answer() -> None:
    """Tell the audit log that the current call was answered."""
    if (call := CALL.get()) is not None:
        call.answer()
