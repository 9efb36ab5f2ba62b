"""Sessions of workers and of other relays, over grpc.aio."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from muster.client.protocol import MAX_ENTRIES, MAX_UNSENT
from muster.relay import refusals, status
from muster.relay.authenticator import Authenticator, Caller
from muster.relay.downstream_stream import DownstreamStream
from muster.relay.router import StreamRouter
from muster.relay.stats import RelayStats
from muster.relay.upstream import CONNECT
from muster.serving.outbox import Outbox
from muster.serving.queued import Queued
from muster.serving.writes import Writes
from muster.v1 import session_pb2 as pb

HELLO_TIMEOUT = 10.0
"""Seconds that a caller has for its first message."""
MAX_UNSENT_BYTES = 33 << 20
"""Bytes of messages that may wait for one stream, as at the coordinator: the payloads of eight barriers."""


class Session:
    """One session: the sink of a downstream stream.

    Args:
        router: finds upstream streams.
        caller: the admitted caller.
        writes: writes to all callers.
        queued: counts the messages that wait for all callers.
        make_room: is called when too many bytes wait for all callers.
    """

    def __init__(
        self,
        router: StreamRouter,
        caller: Caller,
        writes: Writes,
        queued: Queued,
        make_room: Callable[[], None],
    ) -> None:
        self._writes = writes
        self._caller = caller
        self._queued = queued
        self._make_room = make_room
        self._outbox = Outbox(queued)
        self._refusal: pb.Refusal | None = None
        self._ended = False
        """Whether the stream has ended."""
        self._write_timeout = asyncio.timeout(None)
        """Ends a write that hangs because the caller does not read."""
        self._stream = DownstreamStream(router, self, caller.check_run)

    @property
    def unsent_bytes(self) -> int:
        """Bytes of the messages that wait for the caller."""
        return self._outbox.bytes

    def send(self, data: bytes, own: bytes = b"") -> None:
        """See ``Sink``."""
        if self._ended:
            return
        limit = MAX_ENTRIES if self._stream.is_relay else MAX_UNSENT
        size = len(data) + len(own)
        too_large = len(self._outbox) > 0 and self._outbox.bytes + size > MAX_UNSENT_BYTES
        if too_large or len(self._outbox) >= limit:
            self.cut_off()
            return
        self._outbox.put(data, own)
        if self._queued.too_many:
            self._make_room()

    def cut_off(self) -> None:
        """End the stream at once, because the caller does not read."""
        waiting = len(self._outbox)
        self._outbox.clear()
        self._stream.end(refusals.slow_consumer(waiting))
        if self._write_timeout.when() is None:
            self._write_timeout.reschedule(0)

    def end(self, refusal: pb.Refusal | None) -> None:
        """See ``Sink``."""
        self._refusal = self._refusal or refusal
        self._outbox.close()

    async def serve(self, context: Any) -> None:
        """Carry messages both ways until either side ends the stream."""
        reader = asyncio.create_task(self._read(context))
        try:
            async with self._write_timeout:
                await self._outbox.write(partial(self._writes.write, context, reader=context.peer))
        except TimeoutError:
            # No status reaches the caller, and gRPC holds the message until it is gone.
            if self._outbox.is_writing:
                await self._writes.end(context.peer())
        finally:
            self._ended = True
            self._outbox.clear()
            reader.cancel()
            self._stream.connection_lost()
        if self._refusal is not None:
            raise refusals.Refused(self._refusal)

    async def _read(self, context: Any) -> None:
        read = self._caller.paced(context.read)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT):
                data = await context.read()
            while data is not grpc.aio.EOF:
                self._stream.receive(data)
                del data  # The next message may come after hours, and this one may be large.
                # While the coordinator does not read, this caller's messages wait at the caller.
                for upstream in self._stream.upstreams:
                    await upstream.outbox.room(MAX_UNSENT)
                data = await read()
        except TimeoutError:
            refused = refusals.hello_required(
                f"no Hello came within {HELLO_TIMEOUT:g} s of opening the session"
            )
            self._stream.end(refused.refusal)
        except refusals.Refused as refused:
            self._stream.end(refused.refusal, announce=True)

    def drain(self) -> None:
        """Ask the caller to continue without this relay."""
        self._stream.end(refusals.draining())


class Sessions(grpc.GenericRpcHandler):
    """``SessionService.Connect`` over raw bytes, so that the relay forwards a decision without a copy.

    Args:
        router: finds upstream streams.
        authenticator: admits callers.
        stats: what is measured.
        writes: writes to callers.
    """

    def __init__(
        self, router: StreamRouter, authenticator: Authenticator, stats: RelayStats, writes: Writes
    ) -> None:
        self._writes = writes
        self._router = router
        self._authenticator = authenticator
        self._stats = stats
        self._queued = Queued()
        self._sessions: set[Session] = set()
        self._draining = False

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """See ``grpc.GenericRpcHandler``."""
        if handler_call_details.method != CONNECT:
            return None
        return grpc.stream_stream_rpc_method_handler(self._connect)

    async def _connect(self, _: object, context: Any) -> None:
        if self._draining:
            await status.end_with(refusals.draining(), context)
            return
        try:
            async with self._authenticator.admit(CONNECT, context) as caller:
                session = Session(self._router, caller, self._writes, self._queued, self._cut_slowest_off)
                await self._serve(session, context)
        except refusals.Refused as refused:
            await status.end_with(refused.refusal, context)

    async def _serve(self, session: Session, context: Any) -> None:
        self._sessions.add(session)
        self._stats.workers += 1
        try:
            await session.serve(context)
        finally:
            self._sessions.discard(session)
            self._stats.workers -= 1

    def _cut_slowest_off(self) -> None:
        max(self._sessions, key=lambda session: session.unsent_bytes).cut_off()

    def drain(self) -> None:
        """Ask every caller to continue without this relay."""
        self._draining = True
        for session in list(self._sessions):
            session.drain()
