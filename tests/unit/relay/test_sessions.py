"""Sessions end when a caller does not read, and wait when the coordinator does not."""

import asyncio
from typing import Any

import grpc
import pytest

from lab.patience import PATIENCE
from muster.client.protocol import MAX_UNSENT
from muster.relay.authenticator import AllowAll, UnrestrictedCaller
from muster.relay.router import StreamRouter
from muster.relay.sessions import MAX_UNSENT_BYTES, Session, Sessions
from muster.relay.stats import RelayStats
from muster.relay.upstream import Upstream
from muster.relay.upstream_stream import UpstreamStream
from muster.serving.budget import SMALL
from muster.serving.queued import Queued
from muster.serving.writes import Writes
from muster.v1 import session_pb2 as pb
from tests.support.world.virtual_time import in_virtual_time

HELLO = pb.ConnectRequest(
    hello=pb.Hello(
        run_id="job",
        protocol_version=1,
        processes=[pb.Process(rank=0, incarnation="i", host="h", pid=1)],
    )
).SerializeToString()


class Context:
    """A downstream stream that has sent two messages."""

    def __init__(self) -> None:
        self.says = [HELLO, pb.ConnectRequest(goodbye=pb.Goodbye()).SerializeToString()]

    async def read(self) -> Any:
        return self.says.pop(0) if self.says else grpc.aio.EOF

    async def write(self, _: bytes) -> None: ...


def upstream_to_nowhere() -> Upstream:
    return Upstream("127.0.0.1:1", name="relay", version="0", stats=RelayStats())


async def test_caller_is_not_read_while_coordinator_does_not_read():
    upstream = upstream_to_nowhere()
    opened: list[UpstreamStream] = []

    def open_stream(*args: Any) -> UpstreamStream:
        opened.append(upstream.open_stream(*args))
        for _ in range(MAX_UNSENT):
            opened[0].outbox.put(b"")
        return opened[0]

    context: Any = Context()
    router = StreamRouter(open_stream, upstream.addresses, "0")
    reading = asyncio.create_task(session_of(router)._read(context))
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(context.says) == 1
    assert [stream.run_id for stream in opened] == ["job"]
    opened[0].outbox.take()
    await reading
    assert context.says == []
    await upstream.close()


def never_slow(reader: str, size: int) -> None:
    raise AssertionError(f"{reader} has not read {size} bytes")


def session_of(router: StreamRouter) -> Session:
    return Session(router, UnrestrictedCaller(), Writes(never_slow), Queued(), lambda: None)


@pytest.mark.parametrize(("relay", "most"), [("", 1_000), ("lower", 65_536)])
async def test_unread_messages_end_a_relays_session_later_than_a_workers(relay: str, most: int):
    """The coordinator may refuse one Arrive of a relay for each of its ranks."""
    upstream = upstream_to_nowhere()

    session = session_of(StreamRouter(upstream.open_stream, upstream.addresses, "0"))
    hello = pb.Hello(run_id="job", protocol_version=1, relay=relay)
    if not relay:
        hello.processes.add(rank=0, incarnation="i", host="h", pid=1)
    session._stream.receive(pb.ConnectRequest(hello=hello).SerializeToString())
    waiting = len(session._outbox)
    for _ in range(most - waiting):
        session.send(b"")
    assert session._refusal is None
    with pytest.raises(TimeoutError):
        async with session._write_timeout:
            session.send(b"")
            await asyncio.sleep(PATIENCE)
    await upstream.close()
    assert "SLOW_CONSUMER" in str(session._refusal)


async def test_caller_that_does_not_read_large_messages_is_cut_off():
    upstream = upstream_to_nowhere()

    session = session_of(StreamRouter(upstream.open_stream, upstream.addresses, "0"))
    hello = pb.Hello(run_id="job", protocol_version=1)
    hello.processes.add(rank=0, incarnation="i", host="h", pid=1)
    session._stream.receive(pb.ConnectRequest(hello=hello).SerializeToString())
    session.send(bytes(MAX_UNSENT_BYTES // 2))
    assert session._refusal is None
    with pytest.raises(TimeoutError):
        async with session._write_timeout:
            session.send(bytes(MAX_UNSENT_BYTES // 2 + 1))
            await asyncio.sleep(PATIENCE)
    await upstream.close()
    assert "SLOW_CONSUMER" in str(session._refusal)
    assert session._outbox.bytes == 0


class Unread:
    """A downstream stream that sends nothing, and reads nothing until a test says so."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.heard: list[bytes] = []
        self.ended: grpc.Status | None = None

    def invocation_metadata(self) -> None: ...

    def peer(self) -> str:
        return f"ipv4:10.0.0.{id(self) % 250}:1"

    async def read(self) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    async def write(self, data: bytes) -> None:
        await self.reads.wait()
        self.heard.append(data)

    async def abort_with_status(self, status: grpc.Status) -> None:
        self.ended = status


class Callers:
    """Streams of a relay whose outboxes have room for three large messages, and for one on its way.

    Attributes:
        contexts: the streams, in the order of their sessions.
    """

    def __init__(self, count: int) -> None:
        self.upstream = upstream_to_nowhere()
        router = StreamRouter(self.upstream.open_stream, self.upstream.addresses, "0")
        writes = Writes(never_slow, most=SMALL, end=self._end)
        self.all = Sessions(router, AllowAll(), RelayStats(), writes)
        self.all._queued = Queued(most=3 * SMALL)
        self.contexts = [Unread() for _ in range(count)]
        self.sessions: list[Session] = []
        self._serving: list[asyncio.Task[None]] = []

    async def _end(self, peer: str) -> bool:
        return True

    async def __aenter__(self) -> "Callers":
        for context in self.contexts:
            self._serving.append(asyncio.create_task(self.all._connect(None, context)))
            await asyncio.sleep(0)
            self.sessions += self.all._sessions - set(self.sessions)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        assert self.all._queued.bytes == 0
        await self.upstream.close()


@in_virtual_time
async def test_caller_with_most_unsent_bytes_makes_room_for_all():
    async with Callers(3) as callers:
        (writing, slow, other), (_, cut, kept) = callers.sessions, callers.contexts
        writing.send(bytes(SMALL + 1))
        await asyncio.sleep(1)
        slow.send(bytes(SMALL + 2))
        slow.send(bytes(SMALL + 3))
        await asyncio.sleep(1)
        assert [context.ended for context in callers.contexts] == [None] * 3
        other.send(bytes(SMALL + 4))
        await asyncio.sleep(1)
        assert cut.ended is not None
        assert "SLOW_CONSUMER" in str(cut.ended.trailing_metadata)
        assert kept.ended is None
        assert callers.all._queued.bytes == other.unsent_bytes == SMALL + 4


@in_virtual_time
async def test_message_for_many_callers_counts_once():
    async with Callers(4) as callers:
        decision = bytes(SMALL + 1)
        for number, session in enumerate(callers.sessions):
            session.send(decision, b"%d" % number)
        assert callers.all._queued.bytes == len(decision)
        for context in callers.contexts:
            context.reads.set()
        await asyncio.sleep(1)
        heard = [data for context in callers.contexts for data in context.heard]
        assert heard == [decision + b"%d" % number for number in range(4)]


async def test_outbox_of_closed_upstream_delays_no_caller():
    upstream = upstream_to_nowhere()
    stream = upstream.open_stream("job", 0, lambda _: None)
    for _ in range(2 * MAX_UNSENT):
        stream.outbox.put(b"")
    waits = asyncio.create_task(stream.outbox.room(MAX_UNSENT))
    await asyncio.sleep(0)
    assert not waits.done()
    await upstream.close()
    await waits
    await stream.outbox.room(MAX_UNSENT)
