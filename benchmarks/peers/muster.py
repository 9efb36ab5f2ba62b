"""Muster's ranks: a session each, on an asyncio client, speaking the wire protocol without the SDK."""

import asyncio
import os
import socket
import time
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import grpc.aio
import uvloop

from benchmarks.peers.base import BARRIER_TIMEOUT_S, LoadSpec, RankTimes, RoundTimes
from lab import aio
from muster.v1 import common_pb2, session_pb2

RUN_ID = "benchmark"
PREFIX = "checkpoint"
# As the SDK sets them. Without the first one, the channels of one process would share a connection.
CHANNEL_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]

Call: TypeAlias = "grpc.aio.StreamStreamCall[session_pb2.ConnectRequest, session_pb2.ConnectResponse]"
Kind: TypeAlias = Literal["welcome", "processes_added", "group_joined", "decision"]
"""Messages of the coordinator that the benchmarks wait for."""
T = TypeVar("T")


def open_load(spec: LoadSpec) -> "SessionLoad":
    """Return ranks that hold a session each."""
    return SessionLoad(spec)


class SessionLoad:
    """The ranks of one load process, on one event loop."""

    def __init__(self, spec: LoadSpec) -> None:
        self._spec = spec
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._streams: Sequence[Stream] = ()

    def connect(self) -> None:
        """Connect every rank and join its group."""
        self._streams = self._run_on_loop(self._connect())

    def run(self, rounds: int) -> RoundTimes:
        """Take every rank through the next `rounds` barriers."""
        return self._run_on_loop(self._run(rounds))

    def _run_on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return self._runner.run(coroutine)
        except grpc.aio.AioRpcError as error:
            raise RuntimeError(f"{error.code().name}: {error.details()}") from error

    async def _connect(self) -> Sequence["Stream"]:
        channels: dict[int, grpc.aio.Channel] = {}
        ranks = []
        for number in self._spec.ranks:
            connection = number // self._spec.ranks_per_connection
            if connection not in channels:
                channels[connection] = grpc.aio.insecure_channel(
                    f"127.0.0.1:{self._spec.port}", options=CHANNEL_OPTIONS
                )
            ranks.append(Rank(number, channels[connection]))
        await asyncio.gather(*(rank.join(self._spec.world_size) for rank in ranks))
        return ranks

    async def _run(self, rounds: int) -> RoundTimes:
        return RoundTimes.of_ranks(
            await asyncio.gather(*(stream.pass_barriers(rounds) for stream in self._streams))
        )


class Stream:
    """One stream, and the ranks that it speaks for: all of them arrive in one message."""

    _call: Call
    _named: int | None = None
    """How many ranks a decision must name, if it is a relay's own stream."""

    def __init__(self, ranks: range) -> None:
        self._ranks = ranks
        self._sequence = 0

    async def _join(self, world_size: int) -> None:
        join_group = session_pb2.JoinGroup(prefix=PREFIX, world_size=world_size, ranks=self._ranks)
        await self._call.write(session_pb2.ConnectRequest(join_group=join_group))
        joined = (await read_until(self._call, "group_joined")).group_joined
        self._sequence = joined.positions[0].sequence

    async def pass_barriers(self, rounds: int) -> RankTimes:
        """Arrive and wait, `rounds` times."""
        times = RankTimes([], [])
        for _ in range(rounds):
            arrive = session_pb2.Arrive(
                prefix=PREFIX,
                sequence=self._sequence,
                timeout_ms=BARRIER_TIMEOUT_S * 1000,
                arrivals=[session_pb2.Arrival(rank=rank) for rank in self._ranks],
            )
            times.arrivals_ns.append(time.monotonic_ns())
            await self._call.write(session_pb2.ConnectRequest(arrive=arrive))
            response = await read_until(self._call, "decision")
            times.releases_ns.append(time.monotonic_ns())
            decision = response.decision
            if decision.sequence != self._sequence or decision.outcome != common_pb2.OUTCOME_RELEASED:
                raise RuntimeError(f"barrier #{self._sequence} was not released: {decision.message}")
            if self._named not in (None, len(response.ranks)):
                raise RuntimeError(f"barrier #{self._sequence}: {len(response.ranks)} ranks were told")
            self._sequence += 1
        return times


class Rank(Stream):
    """One rank's session."""

    def __init__(self, number: int, channel: grpc.aio.Channel) -> None:
        super().__init__(range(number, number + 1))
        self._call = aio.sessions(channel).Connect(wait_for_ready=True)

    async def join(self, world_size: int) -> None:
        """Say hello and join the group."""
        process = session_pb2.Process(
            rank=self._ranks.start, incarnation=uuid.uuid4().hex, host=socket.gethostname(), pid=os.getpid()
        )
        hello = session_pb2.Hello(run_id=RUN_ID, processes=[process], protocol_version=1)
        await self._call.write(session_pb2.ConnectRequest(hello=hello))
        await read_until(self._call, "welcome")
        await self._join(world_size)


async def read_until(call: Call, wanted: Kind) -> session_pb2.ConnectResponse:
    """Read a stream until a message of the wanted kind comes, and return that message.

    Raises:
        RuntimeError: the coordinator refused something, or the stream ended.
    """
    while True:
        response = await aio.read(call)
        if response is None:
            raise RuntimeError(f"the session ended: {await call.details()}")
        kind = response.WhichOneof("message")
        if kind == wanted:
            return response
        if kind == "refusal":
            raise RuntimeError(f"refused: {response.refusal.message}")
