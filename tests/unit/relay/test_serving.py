import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
import pytest

from muster.relay.counts import Counts
from muster.relay.door import Anyone
from muster.relay.line import Line
from muster.relay.relay import Relay
from muster.relay.serving import Session
from muster.relay.upstream import Upstream
from muster.v1 import session_pb2 as pb
from tests.support.patience import PATIENCE

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
    reading = asyncio.create_task(Session(relay, Anyone(), room)._read(context))
    await waits.wait()
    assert len(context.says) == 1
    (line,) = asked
    assert line.run_id == "job"
    has_room.set()
    await reading
    assert context.says == []
    await upstream.close()


@pytest.mark.parametrize(("relay", "most"), [("", 1_000), ("lower", 65_536)])
async def test_guest_that_does_not_read_is_cut_off_later_when_it_is_a_relay(relay: str, most: int):
    """One Arrive of a relay may be refused for each of its ranks."""
    upstream = Upstream("127.0.0.1:1", name="relay", version="0", counts=Counts())

    async def room(_: Iterable[Line]) -> None: ...

    session = Session(Relay(upstream.open_line, upstream.addresses, "0"), Anyone(), room)
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
