"""SessionService: a stream for every worker process."""

import asyncio
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, TypeAlias

import grpc

from muster.client.protocol import MAX_ENTRIES
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.effects import NO_RANKS, GroupJoined, Inspect, Refused, Welcome
from muster.service.core.vocabulary.events import Disconnected, Event, Goodbye, Hello, JoinGroup
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import SessionId
from muster.service.core.vocabulary.refusal import Reason, Refusal, limit_exceeded
from muster.service.draining import DRAINING
from muster.service.driver import Driver, Outgoing
from muster.service.rpc import codec, errors
from muster.service.rpc.interceptors.guard import ADMISSION, Admission
from muster.service.rpc.interceptors.unsent import log_slow_reader, slow_reader
from muster.service.rpc.join_turns import JoinTurn, JoinTurns
from muster.service.rpc.write_pace import WritePaces
from muster.service.security.audit import CALL
from muster.serving.outbox import Outbox
from muster.serving.queued import MAX_BYTES, Queued
from muster.serving.writes import Writes
from muster.v1.insight_pb2 import Inspected

MAX_UNSENT_BYTES = 32 << 20
"""Size limit of messages that may wait for one peer."""
OnInspected: TypeAlias = Callable[[SessionId, Inspected], None]
"""Takes a process's answer to an inspection."""


def ignore_answer(session: SessionId, answer: Inspected) -> None:
    """Ignore an answer."""


def nothing() -> None:
    """Make no room: there is no other session to cut off."""


class Session:
    """One open stream: it submits the peer's messages, and sends the driver's messages in order.

    Args:
        driver: takes the events.
        max_unsent: messages that may wait for a peer that does not read. Beyond that it is cut off. A relay's
            limit is the maximum number of ranks in a message, because each may have its own answer.
        welcome: encodes a Welcome.
        on_inspected: takes answers to inspections.
        max_unsent_bytes: size limit of waiting messages.
        queued: counts the bytes in the outboxes of all sessions.
        writes: writes to readers.
        make_room: is called if too many bytes wait in all outboxes.
        join_turns: limits the concurrent joins of each run.
        paces: limit the writes of each run.
    """

    def __init__(
        self,
        driver: Driver,
        max_unsent: int,
        welcome: Callable[[Welcome], bytes] = codec.encode_welcome,
        on_inspected: OnInspected = ignore_answer,
        *,
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
        queued: Queued | None = None,
        writes: Writes | None = None,
        make_room: Callable[[], None] = nothing,
        join_turns: JoinTurns | None = None,
        paces: WritePaces | None = None,
    ) -> None:
        self._driver = driver
        self._on_inspected = on_inspected
        self._welcome = welcome
        self._max_unsent = max_unsent
        self._max_unsent_bytes = max_unsent_bytes
        self._queued = queued if queued is not None else Queued()
        self._writes = writes if writes is not None else Writes(log_slow_reader)
        self._make_room = make_room
        self._join_turns = join_turns if join_turns is not None else JoinTurns()
        self._join_turn: JoinTurn | None = None
        """The turns of its joins; None before the Hello."""
        self._paces = paces if paces is not None else WritePaces()
        self._name = "a session that has not said Hello"
        self._outbox = Outbox(self._queued)
        self._patience = asyncio.timeout(None)
        """Cancels a write that hangs because the peer does not read."""
        self._cut_off = False
        self._status: Refusal | None = None
        self.id = driver.connect(self)

    @property
    def unsent_bytes(self) -> int:
        """Bytes of the messages that wait for the peer."""
        return self._outbox.bytes

    def deliver(self, outgoing: Outgoing, ranks: AbstractSet[int] = NO_RANKS) -> None:
        """Send a message, and its ranks to a relay. A final refusal also ends the stream."""
        message = outgoing.message
        if type(message) in (GroupJoined, Refused) and self._join_turn is not None:
            self._join_turn.end()
        if self._outbox.closed:
            return  # An earlier message ended the stream.
        if type(message) is Inspect and len(self._outbox) > self._max_unsent // 2:
            return  # A question must not cause a slow reader to be cut off.
        data = self._welcome(message) if type(message) is Welcome else outgoing.data
        self._send(data, codec.encode_ranks(ranks) if ranks else b"")
        if type(message) is Refused and message.final:
            self._status = message.refusal
            self._outbox.close()

    def drain(self) -> None:
        """Ask the worker to connect again, and end the stream."""
        self._send(codec.DRAIN)
        self.end(DRAINING)

    def end(self, status: Refusal | None = None) -> None:
        """End the stream after all queued messages."""
        self._status = self._status or status
        self._outbox.close()

    def _send(self, data: bytes, own: bytes = b"") -> None:
        """Put a message into the outbox.

        Args:
            data: the bytes that are the same for all receivers.
            own: further bytes for this peer only. A joined copy for each peer would use memory until it is
                written.
        """
        outbox = self._outbox
        waiting = len(outbox.waiting)
        if waiting >= self._max_unsent:
            self.cut_off(f"{self._max_unsent} messages")
        elif waiting and outbox.bytes + len(data) + len(own) > self._max_unsent_bytes:
            self.cut_off(f"messages of {outbox.bytes:,} bytes")
        elif not outbox.closed:
            outbox.put(data, own)
            if self._queued.too_many:
                self._make_room()

    def cut_off(self, held: str = "") -> None:
        """End the stream at once, because its peer does not read.

        Args:
            held: a description of the waiting messages; empty: the whole outbox.
        """
        if not self._cut_off:
            self._cut_off = True
            held = held or f"messages of {self.unsent_bytes:,} bytes"
            self.end(slow_reader(self._name, held, self.unsent_bytes))
            self._outbox.clear()
            if self._patience.when() is None:
                self._patience.reschedule(0)

    async def serve(self, context: Any, hello_timeout: float) -> None:
        """Carry messages both ways until either side ends the stream.

        Args:
            context: the call's grpc.aio context, over raw bytes.
            hello_timeout: seconds that the peer has for its first message.
        """
        reader = asyncio.create_task(self._read(context, hello_timeout))
        try:
            async with self._patience:
                await self._outbox.write(partial(self._writes.write, context, reader=self._reader))
        except TimeoutError:
            # No status reaches the peer; gRPC keeps the message while it is connected.
            if self._outbox.is_writing:
                await self._writes.end(context.peer())
        finally:  # gRPC cancels this call when its connection is lost: so a death is noticed.
            reader.cancel()
            if self._join_turn is not None:
                self._join_turn.end_all()
            self._outbox.clear()
            self._driver.disconnect(self.id)
            ended = self._outbox.closed or ADMISSION.get().has_ended or self._writes.has_ended(context.peer())
            self._driver.submit(Disconnected(self.id, reset=not ended))
        if self._status is not None:
            await errors.end_with(self._status, context)

    def _reader(self) -> str:
        return self._name

    async def _read(self, context: Any, hello_timeout: float) -> None:
        admission = ADMISSION.get()
        read = admission.paced(context.read)
        try:
            async with asyncio.timeout(hello_timeout):
                data = await context.read()
            if data is grpc.aio.EOF:
                raise Refusal(
                    Reason.HELLO_REQUIRED,
                    "the session was closed before it said anything. Open another, and say Hello first.",
                )
            event = self._admitted(data, admission)
            self._submit(event)
            # A peer that sends nothing more but still reads is alive. Only a goodbye or the loss of the
            # stream ends its session.
            while type(event) is not Goodbye:
                del data, event  # The next message may come after hours, and this one may be large.
                data = await read()
                if data is grpc.aio.EOF:
                    return
                event = self._admitted(data, admission)
                if type(event) is JoinGroup and self._join_turn is not None:
                    data = b""  # A whole job may wait here to join, and each message may list all ranks.
                    await self._join_turn.begin(len(event.ranks))
                self._submit(event)
            self.end()
        except TimeoutError:
            self.end(
                Refusal(
                    Reason.HELLO_REQUIRED,
                    f"no Hello came within {hello_timeout:g} s of opening the session. Open another, "
                    "and say it first.",
                )
            )
        except Refusal as refusal:
            refusal.forget_origin()
            self.end(refusal)

    def _submit(self, event: Event | Inspected) -> None:
        if isinstance(event, Inspected):
            self._on_inspected(self.id, event)
            return
        if self._driver.retired:
            # A goodbye above all must not seem accepted.
            raise DRAINING
        self._driver.submit(event)

    def _admitted(self, data: bytes, admission: Admission) -> Event | Inspected:
        """Parse a message and check its run. A Hello may come after refused messages."""
        event = codec.parse_session_message(self.id, data)
        if type(event) is Hello:
            admission.check_run(event.run_id)
            if (call := CALL.get()) is not None:
                call.open(event.run_id)
            self._name = _name(event)
            self._join_turn = self._join_turn or self._join_turns.of(event.run_id)
            self._outbox.wake_up = self._paces.of(event.run_id).wake_up
            if event.relay:
                self._max_unsent = max(self._max_unsent, MAX_ENTRIES)
        return event


def _name(hello: Hello) -> str:
    """Name the peer of a stream for people."""
    run_id = report.shown(hello.run_id)
    if hello.relay:
        return f"relay {report.shown(hello.relay)} of run {run_id}"
    hosts = report.shown(", ".join(dict.fromkeys(process.host for process in hello.processes)))
    ranks = report.shown(report.ranges(process.rank for process in hello.processes))
    return f"run {run_id}, rank {ranks} on {hosts}"


class SessionServicer:
    """Serves ``muster.v1.SessionService`` over raw bytes, so that a decision is encoded once for all.

    Args:
        driver: takes the events.
        hello_timeout: seconds that a peer has for its first message.
        max_unsent: messages that may wait for one peer.
        max_open: open streams, including those without a Hello yet.
        replicas: the addresses of all replicas, for the Welcome; empty: this is the only one.
        keepalive_ms: the keepalive for clients; 0: a third of the session TTL.
        on_inspected: takes answers to inspections.
        max_unsent_bytes: size limit of messages that may wait for one peer.
        max_queued_bytes: size limit of messages that may wait for all peers.
        writes: writes to readers.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        hello_timeout: float = 10.0,
        max_unsent: int = 1_000,
        max_open: int = 2 * Limits().max_sessions,
        replicas: Callable[[], Sequence[str]] = tuple,
        keepalive_ms: int = 0,
        on_inspected: OnInspected = ignore_answer,
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
        max_queued_bytes: int = MAX_BYTES,
        writes: Writes | None = None,
    ) -> None:
        self._driver = driver
        self._on_inspected = on_inspected
        self._max_unsent_bytes = max_unsent_bytes
        self._queued = Queued(max_queued_bytes)
        self._join_turns = JoinTurns()
        self._paces = WritePaces()
        self._writes = writes if writes is not None else Writes(log_slow_reader)
        self._hello_timeout = hello_timeout
        self._max_unsent = max_unsent
        self._max_open = max_open
        self._replicas = replicas
        self._keepalive_ms = keepalive_ms
        self._draining = False
        self.sessions: set[Session] = set()

    async def connect(self, _: object, context: Any) -> None:
        """Handle one ``Connect`` call."""
        if self._draining:
            raise DRAINING
        if (count := len(self.sessions)) >= self._max_open:
            raise limit_exceeded("max_sessions", self._max_open // 2, f"{count} streams are open")
        session = Session(
            self._driver,
            self._max_unsent,
            self._welcome,
            self._on_inspected,
            max_unsent_bytes=self._max_unsent_bytes,
            queued=self._queued,
            writes=self._writes,
            make_room=self._cut_slowest_off,
            join_turns=self._join_turns,
            paces=self._paces,
        )
        self.sessions.add(session)
        try:
            await session.serve(context, self._hello_timeout)
        finally:
            self.sessions.discard(session)

    def _welcome(self, message: Welcome) -> bytes:
        return codec.encode_welcome(message, self._replicas(), self._keepalive_ms)

    def _cut_slowest_off(self) -> None:
        max(self.sessions, key=lambda session: session.unsent_bytes).cut_off()

    def drain(self) -> None:
        """Ask every worker to connect again, and refuse new sessions."""
        self._draining = True
        for session in list(self.sessions):
            session.drain()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the service for ``add_generic_rpc_handlers``."""
        method: Any = grpc.stream_stream_rpc_method_handler(self.connect)
        return grpc.method_handlers_generic_handler("muster.v1.SessionService", {"Connect": method})
