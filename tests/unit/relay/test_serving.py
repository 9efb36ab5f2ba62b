import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
import pytest

from lab.patience import PATIENCE
from muster.relay.counts import Counts
from muster.relay.door import Anyone, OpenDoor
from muster.relay.line import Line
from muster.relay.listening import listen_at
from muster.relay.passing import Passing
from muster.relay.relay import Relay
from muster.relay.serving import RelayServer, Room, Session, Sessions
from muster.relay.streams import MAX_UNSENT_BYTES
from muster.relay.upstream import Upstream
from muster.service.core.vocabulary.limits import Limits
from muster.service.rpc.server import options as coordinators
from muster.serving.budget import SMALL
from muster.serving.options import HANDSHAKE_TIMEOUT_MS, READ_TIMEOUT
from muster.serving.queued import Queued
from muster.serving.writes import Writes
from muster.v1 import session_pb2 as pb
from tests.support.world.virtual_time import START, in_virtual_time

HELLO = pb.ConnectRequest(
    hello=pb.Hello(
        run_id="job",
        protocol_version=1,
        processes=[pb.Process(rank=0, incarnation="i", host="h", pid=1)],
    )
).SerializeToString()


class Context:
    """A stream from below, on which two messages have come."""

    def __init__(self) -> None:
        self.says = [HELLO, pb.ConnectRequest(goodbye=pb.Goodbye()).SerializeToString()]

    async def read(self) -> Any:
        return self.says.pop(0) if self.says else grpc.aio.EOF

    async def write(self, _: bytes) -> None: ...


async def test_a_guest_is_not_read_while_the_coordinator_does_not_read_what_it_said():
    upstream = Upstream("127.0.0.1:1", name="relay", version="0", counts=Counts())
    asked: list[Line] = []
    waits, has_room = asyncio.Event(), asyncio.Event()

    async def room(lines: Iterable[Line]) -> None:
        asked.extend(lines)
        waits.set()
        await has_room.wait()

    relay = Relay(upstream.open_line, upstream.addresses, "0")
    context: Any = Context()
    reading = asyncio.create_task(session_of(relay, room)._read(context))
    await waits.wait()
    assert len(context.says) == 1
    (line,) = asked
    assert line.run_id == "job"
    has_room.set()
    await reading
    assert context.says == []
    await upstream.close()


def test_relay_takes_the_servers_options_of_the_coordinator(monkeypatch: pytest.MonkeyPatch):
    taken: list[dict[str, int]] = []

    class Server:
        def __init__(self, options: list[tuple[str, int]], **_: object) -> None:
            taken.append(dict(options))

        def add_generic_rpc_handlers(self, _: object) -> None: ...

    monkeypatch.setattr(grpc.aio, "server", Server)
    upstream = Upstream("127.0.0.1:1", name="relay", version="0", counts=Counts())
    relay = Relay(upstream.open_line, upstream.addresses, "0")
    counts = Counts()
    RelayServer(
        listen_at("unix:///s"),
        upstream,
        relay,
        OpenDoor(),
        counts,
        max_connections=7,
        max_message_bytes=8,
    )
    (options,) = taken
    assert options["grpc.max_allowed_incoming_connections"] == 7
    assert options["grpc.max_receive_message_length"] == 8
    assert options.keys() == {name for name, _ in coordinators(10.0, Limits(), 7)}
    assert options["grpc.server_handshake_timeout_ms"] == HANDSHAKE_TIMEOUT_MS


@in_virtual_time
async def test_call_whose_request_does_not_come_is_refused_by_relay():
    upstream = Upstream("127.0.0.1:1", name="relay", version="0", counts=Counts())

    class Silent(Context):
        refused: grpc.Status

        async def read(self) -> Any:
            await asyncio.Event().wait()

        def peer(self) -> str:
            return "ipv4:10.0.0.7:1"

        def invocation_metadata(self) -> None: ...

        async def abort_with_status(self, status: grpc.Status) -> None:
            self.refused = status

    class Details:
        method = "/muster.v1.StoreService/Set"

    context = Silent()
    handler = Passing(upstream, OpenDoor(), Counts(), Writes(never_slow)).service(Details())  # type: ignore[arg-type]
    await handler.stream_stream(None, context)
    assert f"must come within {READ_TIMEOUT:g} s" in context.refused.details
    assert asyncio.get_running_loop().time() == START + READ_TIMEOUT


def never_slow(reader: str, size: int) -> None:
    raise AssertionError(f"{reader} has not read {size} bytes")


def session_of(relay: Relay, room: Room) -> Session:
    return Session(relay, Anyone(), room, Writes(never_slow), Queued(), lambda: None)


@pytest.mark.parametrize(("relay", "most"), [("", 1_000), ("lower", 65_536)])
async def test_guest_that_does_not_read_is_cut_off_later_when_it_is_a_relay(relay: str, most: int):
    """One Arrive of a relay may be refused for each of its ranks."""
    upstream = Upstream("127.0.0.1:1", name="relay", version="0", counts=Counts())

    async def room(_: Iterable[Line]) -> None: ...

    session = session_of(Relay(upstream.open_line, upstream.addresses, "0"), room)
    hello = pb.Hello(run_id="job", protocol_version=1, relay=relay)
    if not relay:
        hello.processes.add(rank=0, incarnation="i", host="h", pid=1)
    session._guest.hear(pb.ConnectRequest(hello=hello).SerializeToString())
    waiting = len(session._outbox)
    for _ in range(most - waiting):
        session.send(b"")
    assert session._refusal is None
    with pytest.raises(TimeoutError):
        async with session._patience:
            session.send(b"")
            await asyncio.sleep(PATIENCE)
    await upstream.close()
    assert "SLOW_CONSUMER" in str(session._refusal)


async def test_guest_that_does_not_read_large_messages_is_cut_off():
    upstream = Upstream("127.0.0.1:1", name="relay", version="0", counts=Counts())

    async def room(_: Iterable[Line]) -> None: ...

    session = session_of(Relay(upstream.open_line, upstream.addresses, "0"), room)
    hello = pb.Hello(run_id="job", protocol_version=1)
    hello.processes.add(rank=0, incarnation="i", host="h", pid=1)
    session._guest.hear(pb.ConnectRequest(hello=hello).SerializeToString())
    session.send(bytes(MAX_UNSENT_BYTES // 2))
    assert session._refusal is None
    with pytest.raises(TimeoutError):
        async with session._patience:
            session.send(bytes(MAX_UNSENT_BYTES // 2 + 1))
            await asyncio.sleep(PATIENCE)
    await upstream.close()
    assert "SLOW_CONSUMER" in str(session._refusal)
    assert session._outbox.bytes == 0


class Unread:
    """A stream from below that says nothing, and reads nothing until it is told to."""

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


class Guests:
    """Streams of a relay whose outboxes have room for three large messages, and for one on its way.

    Attributes:
        contexts: the streams, in the order of their sessions.
    """

    def __init__(self, count: int) -> None:
        self.upstream = Upstream("127.0.0.1:1", name="relay", version="0", counts=Counts())
        relay = Relay(self.upstream.open_line, self.upstream.addresses, "0")
        writes = Writes(never_slow, most=SMALL, end=self._end)
        self.all = Sessions(relay, OpenDoor(), Counts(), self.upstream.room, writes)
        self.all._queued = Queued(most=3 * SMALL)
        self.contexts = [Unread() for _ in range(count)]
        self.sessions: list[Session] = []
        self._serving: list[asyncio.Task[None]] = []

    async def _end(self, peer: str) -> bool:
        return True

    async def __aenter__(self) -> "Guests":
        for context in self.contexts:
            self._serving.append(asyncio.create_task(self.all._connect(None, context)))
            await asyncio.sleep(0)
            self.sessions += self.all._open - set(self.sessions)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        assert self.all._queued.bytes == 0
        await self.upstream.close()


@in_virtual_time
async def test_guest_with_most_unsent_bytes_makes_room_for_all():
    async with Guests(3) as guests:
        (writing, slow, other), (_, cut, kept) = guests.sessions, guests.contexts
        writing.send(bytes(SMALL + 1))
        await asyncio.sleep(1)
        slow.send(bytes(SMALL + 2))
        slow.send(bytes(SMALL + 3))
        await asyncio.sleep(1)
        assert [context.ended for context in guests.contexts] == [None] * 3
        other.send(bytes(SMALL + 4))
        await asyncio.sleep(1)
        assert cut.ended is not None
        assert "SLOW_CONSUMER" in str(cut.ended.trailing_metadata)
        assert kept.ended is None
        assert guests.all._queued.bytes == other.unsent_bytes == SMALL + 4


@in_virtual_time
async def test_message_for_many_guests_counts_once():
    async with Guests(4) as guests:
        decision = bytes(SMALL + 1)
        for number, session in enumerate(guests.sessions):
            session.send(decision, b"%d" % number)
        assert guests.all._queued.bytes == len(decision)
        for context in guests.contexts:
            context.reads.set()
        await asyncio.sleep(1)
        heard = [data for context in guests.contexts for data in context.heard]
        assert heard == [decision + b"%d" % number for number in range(4)]


async def test_there_is_room_on_lines_that_are_over():
    upstream = Upstream("127.0.0.1:1", name="relay", version="0", counts=Counts())
    line = upstream.open_line("job", 0, lambda _: None)
    for _ in range(2_000):
        line._say(pb.ConnectRequest())
    waits = asyncio.create_task(upstream.room([line]))
    await asyncio.sleep(0)
    assert not waits.done()
    await upstream.close()
    await waits
    await upstream.room([line])
