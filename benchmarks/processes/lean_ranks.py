"""Ranks that speak the protocol without the SDK: what they cost in processor time is little beside it.

They follow a change of the leader as the SDK's sessions do: a rank that lost its leader asks another
replica, which holds the call until it can name the next leader.
"""

import asyncio
import random
import time
import uuid
from contextlib import suppress
from itertools import cycle
from multiprocessing.connection import Connection

import grpc.aio
import uvloop
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from lab import aio
from lab.open_files import allow_many_files
from muster.v1 import common_pb2, session_pb2

PREFIX = "bench"
KEEPALIVE_MS = 1_667
"""As the SDK's among several replicas."""
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.max_pings_without_data", 0),
    # gRPC's name is misleading: it is the time that one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 2_000),
]
CONNECTING_AT_ONCE = 50
PAUSE = 0.1
"""Seconds, about, before another replica is asked where one knew of no leader."""


class Lost(Exception):
    """The stream has ended. The error may name the leader."""

    def __init__(self, leader: str) -> None:
        super().__init__(leader)
        self.leader = leader


class LeanRank:
    """One rank, which comes back to its barrier under each new leader.

    Args:
        addresses: all replicas.
        number: the rank.
        world_size: how many ranks there are.
    """

    def __init__(self, addresses: list[str], number: int, world_size: int) -> None:
        self._others = cycle(random.sample(addresses, len(addresses)))
        self._target = next(self._others)
        self._unreached = ""
        self._world_size = world_size
        self._process = session_pb2.Process(
            rank=number, incarnation=uuid.uuid4().hex, host=f"lean-{number // 8}", pid=1
        )
        self._channel: grpc.aio.Channel | None = None
        self._call: (
            grpc.aio.StreamStreamCall[session_pb2.ConnectRequest, session_pb2.ConnectResponse] | None
        ) = None
        self._sequence = 0

    async def join(self) -> None:
        """Say hello to the leader, and join the group."""
        while self._call is None:
            with suppress(Lost):
                await self._attempt()

    async def barrier(self) -> float:
        """Arrive, again where it is needed; when it was released."""
        began = time.monotonic()
        while True:
            await self.join()
            try:
                return await self._arrive(began)
            except Lost as lost:
                await self._lose(lost)

    async def _attempt(self) -> None:
        self._channel = grpc.aio.insecure_channel(self._target, options=OPTIONS)
        header = (("muster-not-leader", self._unreached),)
        self._call = aio.sessions(self._channel).Connect(metadata=header)
        try:
            hello = session_pb2.Hello(run_id="bench", processes=[self._process], protocol_version=1)
            await self._say(session_pb2.ConnectRequest(hello=hello))
            self._process.ordinal = (await self._next("welcome")).welcome.ordinals[0]
            join = session_pb2.JoinGroup(prefix=PREFIX, world_size=self._world_size)
            await self._say(session_pb2.ConnectRequest(join_group=join))
            position = (await self._next("group_joined")).group_joined.positions[0]
            self._sequence = max(self._sequence, position.sequence)
            self._unreached = ""
        except Lost as lost:
            await self._lose(lost)
            raise

    async def _lose(self, lost: Lost) -> None:
        if not self._unreached and not lost.leader:
            self._unreached = self._target
        assert self._channel is not None
        await self._channel.close()
        self._call = None
        if lost.leader and lost.leader != self._target:
            self._target = lost.leader
            return
        self._target = next(other for other in self._others if other != self._unreached)
        await asyncio.sleep(PAUSE * random.uniform(0, 1))

    async def _arrive(self, began: float) -> float:
        arrive = session_pb2.Arrive(
            prefix=PREFIX,
            sequence=self._sequence,
            timeout_ms=120_000,
            arrivals=[session_pb2.Arrival(rank=self._process.rank)],
            waited_ms=round((time.monotonic() - began) * 1000),
        )
        await self._say(session_pb2.ConnectRequest(arrive=arrive))
        decision = (await self._next("decision")).decision
        if decision.outcome != common_pb2.OUTCOME_RELEASED:
            raise RuntimeError(decision.message)
        self._sequence = decision.sequence + 1
        return time.monotonic()

    async def _say(self, message: session_pb2.ConnectRequest) -> None:
        assert self._call is not None
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise Lost(await self._named()) from None

    async def _next(self, wanted: str) -> session_pb2.ConnectResponse:
        assert self._call is not None
        while True:
            try:
                response = await aio.read(self._call)
            except grpc.aio.AioRpcError:
                response = None
            if response is None or response.HasField("drain"):
                raise Lost("" if response is not None else await self._named())
            if response.WhichOneof("message") == wanted:
                return response

    async def _named(self) -> str:
        """Return the leader that the end of the call names."""
        assert self._call is not None
        for key, value in await self._call.trailing_metadata() or ():
            if key == "grpc-status-details-bin" and isinstance(value, bytes):
                info = ErrorInfo()
                for detail in Status.FromString(value).details:
                    if detail.Unpack(info):
                        return str(info.metadata.get("leader", ""))
        return ""


def play(endpoint: str, ranks: range, world_size: int, pipe: Connection) -> None:
    """Be several ranks: arrive when told to, and tell when each one was released."""
    allow_many_files()
    uvloop.run(_play(endpoint.split(","), ranks, world_size, pipe))


async def _play(addresses: list[str], ranks: range, world_size: int, pipe: Connection) -> None:
    everyone = {number: LeanRank(addresses, number, world_size) for number in ranks}
    connecting = asyncio.Semaphore(CONNECTING_AT_ONCE)

    async def join(rank: LeanRank) -> None:
        async with connecting:
            await rank.join()

    await asyncio.gather(*map(join, everyone.values()))
    pipe.send("joined")
    while (numbers := await asyncio.to_thread(pipe.recv)) is not None:
        arriving = [rank for number, rank in everyone.items() if number in numbers]
        pipe.send(await asyncio.gather(*(rank.barrier() for rank in arriving)))
