"""The way down: the server that workers, and other relays, connect to."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import grpc

from muster.relay import refusals, status
from muster.relay.counts import Counts
from muster.relay.door import Door, Visitor
from muster.relay.guest import MOST_ENTRIES, Guest
from muster.relay.line import Line
from muster.relay.listening import Listen
from muster.relay.passing import Passing
from muster.relay.relay import Relay
from muster.relay.streams import MAX_UNSENT, MAX_UNSENT_BYTES, Outbox, Take
from muster.relay.upstream import CONNECT, Upstream
from muster.serving.options import server_options
from muster.serving.queued import Queued
from muster.serving.writes import Writes
from muster.v1 import session_pb2 as pb

logger = logging.getLogger(__name__)

HELLO_TIMEOUT = 10.0
"""Seconds that a guest has for its first message."""
KEEPALIVE_MS = 1_000
"""Ping a guest after so long without data, and wait so long for the answer: as often as a coordinator with
the shortest session TTL, so that no death is noticed later than without the relay."""
MAX_STREAMS = 20_000
"""Streams and calls at once."""
Room = Callable[[Iterable[Line]], Awaitable[None]]


class Session:
    """One stream from below: the sink of a guest.

    Args:
        relay: takes the guest in.
        visitor: what it may touch.
        room: waits while what is said on lines is not taken.
        writes: writes to guests.
        queued: counts the messages that wait for all guests.
        make_room: is called when too many bytes wait for all guests.
    """

    def __init__(
        self,
        relay: Relay,
        visitor: Visitor,
        room: Room,
        writes: Writes,
        queued: Queued,
        make_room: Callable[[], None],
    ) -> None:
        self._writes = writes
        self._room = room
        self._visitor = visitor
        self._queued = queued
        self._make_room = make_room
        self._outbox = Outbox(queued)
        self._refusal: pb.Refusal | None = None
        self._served = False
        """Whether the stream has ended."""
        self._patience = asyncio.timeout(None)
        """Ends a write that does not end, since the guest does not read."""
        self._is_writing = False
        """Whether gRPC holds a message that the guest has not taken."""
        self._guest: Guest = relay.guest(self, visitor.check_run)

    @property
    def unsent_bytes(self) -> int:
        """Bytes of the messages that wait for the guest."""
        return self._outbox.bytes

    def send(self, data: bytes, own: bytes = b"") -> None:
        """See ``Sink``."""
        if self._served:
            return
        # A relay may be answered for each rank of one message, which may be refused for each of them.
        most = MOST_ENTRIES if self._guest.is_relay else MAX_UNSENT
        size = len(data) + len(own)
        too_large = len(self._outbox) > 0 and self._outbox.bytes + size > MAX_UNSENT_BYTES
        if too_large or len(self._outbox) >= most:
            self.cut_off()
            return
        self._outbox.put(data, own)
        if self._queued.too_many:
            self._make_room()

    def cut_off(self) -> None:
        """End the stream at once, since the guest does not read."""
        waiting = len(self._outbox)
        self._outbox.clear()
        self._guest.end(refusals.slow_consumer(waiting))
        if self._patience.when() is None:
            self._patience.reschedule(0)

    def end(self, refusal: pb.Refusal | None) -> None:
        """See ``Sink``."""
        self._refusal = self._refusal or refusal
        self._outbox.close()

    async def serve(self, context: Any) -> None:
        """Carry messages both ways until either side ends the stream."""
        reader = asyncio.create_task(self._read(context))
        try:
            async with self._patience:
                await self._outbox.write(partial(self._write, context))
        except TimeoutError:
            if self._is_writing:  # No status reaches it, and gRPC holds the message while it is connected.
                await self._writes.end(context.peer())
        finally:
            self._served = True
            self._outbox.clear()
            reader.cancel()
            self._guest.lost()
        if self._refusal is not None:
            await status.end_with(self._refusal, context)

    async def _write(self, context: Any, size: int, take: Take) -> None:
        def make() -> bytes | None:
            data = take()
            self._is_writing = data is not None
            return data

        await self._writes.write(context, size, make, context.peer)
        self._is_writing = False

    async def _read(self, context: Any) -> None:
        read = self._visitor.paced(context.read)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT):
                data = await context.read()
            while data is not grpc.aio.EOF:
                self._guest.hear(data)
                await self._room(self._guest.lines)
                data = await read()
        except TimeoutError:
            refused = refusals.hello_required(
                f"no Hello came within {HELLO_TIMEOUT:g} s of opening the session"
            )
            self._guest.end(refused.refusal)
        except refusals.Refused as refused:
            self._guest.end(refused.refusal, tell=True)

    def dismiss(self) -> None:
        """The relay stops."""
        self._guest.end(refusals.draining())


class Sessions(grpc.GenericRpcHandler):
    """``SessionService.Connect`` over raw bytes, so that a decision goes on as it came.

    Args:
        relay: takes guests in.
        door: lets them in.
        counts: what is measured.
        room: waits while what is said on lines is not taken.
        writes: writes to guests.
    """

    def __init__(self, relay: Relay, door: Door, counts: Counts, room: Room, writes: Writes) -> None:
        self._writes = writes
        self._room = room
        self._relay = relay
        self._door = door
        self._counts = counts
        self._queued = Queued()
        self._open: set[Session] = set()
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
            async with self._door.admitted(
                CONNECT, context.invocation_metadata() or (), context.peer()
            ) as visitor:
                session = Session(
                    self._relay, visitor, self._room, self._writes, self._queued, self._cut_slowest_off
                )
                await self._serve(session, context)
        except refusals.Refused as refused:
            await status.end_with(refused.refusal, context)

    async def _serve(self, session: Session, context: Any) -> None:
        self._open.add(session)
        self._counts.workers += 1
        try:
            await session.serve(context)
        finally:
            self._open.discard(session)
            self._counts.workers -= 1

    def _cut_slowest_off(self) -> None:
        max(self._open, key=lambda session: session.unsent_bytes).cut_off()

    def drain(self) -> None:
        """Ask every guest to go on without this relay."""
        self._draining = True
        for session in list(self._open):
            session.dismiss()


class RelayServer:
    """A relay that listens.

    Args:
        listen: where; what may be in the way there is gone.
        upstream: the way to the coordinator.
        relay: the relay.
        door: who is let in.
        counts: what is measured.
        max_connections: open at once.
        max_message_bytes: of one message from below; what the coordinator takes, each guest is told.
    """

    def __init__(
        self,
        listen: Listen,
        upstream: Upstream,
        relay: Relay,
        door: Door,
        counts: Counts,
        *,
        max_connections: int,
        max_message_bytes: int,
    ) -> None:
        self._listen = listen
        self._upstream = upstream
        writes = Writes(_log_slow_reader)
        self._sessions = Sessions(relay, door, counts, upstream.room, writes)
        self._passing = Passing(upstream, door, counts, writes)
        self._server = grpc.aio.server(
            options=server_options(
                max_streams=MAX_STREAMS,
                max_connections=max_connections,
                max_message_bytes=max_message_bytes,
                keepalive_ms=KEEPALIVE_MS,
            )
        )
        self._server.add_generic_rpc_handlers((self._sessions, self._passing))

    async def start(self, tls: grpc.ServerCredentials | None, socket_mode: int) -> None:
        """Begin to listen; :meth:`stop` follows, also where this fails.

        Args:
            tls: what a port shows; None: it does without.
            socket_mode: the permissions of a socket.

        Raises:
            OSError: the socket's permissions cannot be set.
            RuntimeError: gRPC cannot listen there.
        """
        if tls is not None:
            self._server.add_secure_port(self._listen.target, tls)
        else:
            self._server.add_insecure_port(self._listen.target)
        self._listen.restrict(socket_mode)
        await self._server.start()

    async def stop(self, grace: float = 1.0) -> None:
        """Ask everyone to connect elsewhere, stop, and take the socket away.

        Args:
            grace: seconds that calls in flight get.
        """
        self._sessions.drain()
        self._passing.drain()
        await self._server.stop(grace)
        await self._upstream.close()
        self._listen.remove()


def _log_slow_reader(reader: str, size: int) -> None:
    logger.warning("%s did not read %d bytes in time: its connection is ended", reader, size)
