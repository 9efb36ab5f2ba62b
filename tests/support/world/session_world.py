"""One session on a stream of which a test holds both ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from muster.service.core.vocabulary.events import Disconnected, Event
from muster.service.core.vocabulary.refusal import Reason
from muster.service.driver import Outgoing
from muster.service.rpc import errors
from muster.service.rpc.join_turns import JoinTurns
from muster.service.rpc.servicers.session import Session
from muster.service.rpc.write_pace import WritePaces
from muster.v1 import session_pb2

HELLO = session_pb2.ConnectRequest(hello=session_pb2.Hello(run_id="job", protocol_version=1))


JOIN = session_pb2.ConnectRequest(join_group=session_pb2.JoinGroup(prefix="ckpt", world_size=2))


ARRIVE = session_pb2.ConnectRequest(arrive=session_pb2.Arrive(prefix="ckpt", timeout_ms=1_000))


GOODBYE = session_pb2.ConnectRequest(goodbye=session_pb2.Goodbye(reason="done"))


ID = 7


class FakeDriver:
    """Remembers its events, in order."""

    def __init__(self) -> None:
        self.retired = False
        self.events: list[Event | str] = []
        self._changed = asyncio.Event()

    def connect(self, sink: Session) -> int:
        return ID

    def disconnect(self, session: int) -> None:
        assert session == ID
        self.events.append("disconnect")

    def submit(self, event: Event) -> None:
        self.events.append(event)
        self._changed.set()

    async def hears(self, count: int) -> None:
        while len(self.events) < count:
            self._changed.clear()
            await self._changed.wait()


class Ended(Exception):
    """The exception that gRPC raises in a handler that aborts."""


class FakeContext:
    """The call of a peer that sends and reads messages. The peer may stop reading."""

    def __init__(self) -> None:
        self._said: asyncio.Queue[Any] = asyncio.Queue()
        self.heard: asyncio.Queue[bytes] = asyncio.Queue()
        self.reads = asyncio.Event()
        self.reads.set()
        self.status: grpc.Status | None = None

    def peer(self) -> str:
        return f"ipv4:10.0.0.7:{id(self)}"

    def says(self, message: Any) -> None:
        self._said.put_nowait(
            message.SerializeToString() if hasattr(message, "SerializeToString") else message
        )

    async def read(self) -> Any:
        return await self._said.get()

    async def write(self, data: bytes) -> None:
        await self.reads.wait()
        self.heard.put_nowait(data)

    async def abort_with_status(self, status: grpc.Status) -> None:
        self.status = status
        raise Ended


class Stream:
    """A session that is being served."""

    def __init__(
        self,
        max_unsent: int = 3,
        max_unsent_bytes: int = 1_000_000,
        join_turns: JoinTurns | None = None,
        paces: WritePaces | None = None,
    ) -> None:
        self.driver = FakeDriver()
        self.context = FakeContext()
        driver: Any = self.driver
        self.session = Session(
            driver, max_unsent, max_unsent_bytes=max_unsent_bytes, join_turns=join_turns, paces=paces
        )
        self.serving: asyncio.Task[None]

    def start(self) -> None:
        self.serving = asyncio.create_task(self.session.serve(self.context, hello_timeout=10.0))

    def deliver(self, message: Any = None, data: bytes = b"x") -> None:
        self.session.deliver(Outgoing(message, lambda _: data))

    async def ends(self) -> grpc.Status | None:
        """Wait for the end of the stream, and return its status; None: OK."""
        try:
            await self.serving
        except Ended:
            assert self.context.status is not None
        assert self.driver.events[-2:] == ["disconnect", Disconnected(ID)], "the driver knows"
        return self.context.status


@asynccontextmanager
async def stream(
    max_unsent: int = 3,
    max_unsent_bytes: int = 1_000_000,
    *,
    hello: bool = True,
    run_id: str = "job",
    join_turns: JoinTurns | None = None,
    paces: WritePaces | None = None,
) -> AsyncIterator[Stream]:
    opened = Stream(max_unsent, max_unsent_bytes, join_turns, paces)
    opened.start()
    if hello:
        opened.context.says(
            session_pb2.ConnectRequest(hello=session_pb2.Hello(run_id=run_id, protocol_version=1))
        )
        await opened.driver.hears(1)
    yield opened
    opened.serving.cancel()
    await asyncio.wait({opened.serving})


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def assert_refused(status: grpc.Status | None, reason: Reason) -> None:
    """Assert that a status is that of a refusal with this reason."""
    assert status is not None
    assert status.code is errors.CODES[reason]
    ((_, data),) = status.trailing_metadata
    assert reason.name.encode() in data
