"""Muster's nodes as their relays speak: a stream for each, and one message for all of its ranks."""

import asyncio
import socket
import uuid
from collections.abc import Iterator, Sequence

import grpc.aio

from benchmarks.peers.base import LoadSpec
from benchmarks.peers.muster import CHANNEL_OPTIONS, RUN_ID, SessionLoad, Stream, read_until
from lab import aio
from muster.v1 import session_pb2

RANKS_PER_NODE = 8
CONNECTING_AT_ONCE = 64


def open_load(spec: LoadSpec) -> "RelayLoad":
    """Return nodes that hold a stream each."""
    return RelayLoad(spec)


def nodes_of(ranks: range) -> Iterator[range]:
    """The ranks of each node."""
    for first in range(ranks.start, ranks.stop, RANKS_PER_NODE):
        yield range(first, min(first + RANKS_PER_NODE, ranks.stop))


class RelayLoad(SessionLoad):
    """The nodes of one load process, on one event loop."""

    async def _connect(self) -> Sequence["RelayStream"]:
        lines = [RelayStream(ranks, self._spec.port) for ranks in nodes_of(self._spec.ranks)]
        at_once = asyncio.Semaphore(CONNECTING_AT_ONCE)

        async def join(line: RelayStream) -> None:
            async with at_once:
                await line.join(self._spec.world_size)

        await asyncio.gather(*map(join, lines))
        return lines


class RelayStream(Stream):
    """One node's stream."""

    def __init__(self, ranks: range, port: int, run_id: str = RUN_ID) -> None:
        super().__init__(ranks)
        self._named = len(ranks)
        self._run_id = run_id
        self._port = port

    async def join(self, world_size: int) -> None:
        """Say hello, let the ranks enter, and let them join the group."""
        # Kept, for a channel that nobody holds is closed.
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self._port}", options=CHANNEL_OPTIONS)
        self._call = aio.sessions(self._channel).Connect(wait_for_ready=True)
        host = f"{socket.gethostname()}-{self._ranks.start // RANKS_PER_NODE}"
        hello = session_pb2.Hello(run_id=self._run_id, protocol_version=1, relay=f"{host}:1")
        await self._call.write(session_pb2.ConnectRequest(hello=hello))
        await read_until(self._call, "welcome")
        processes = [
            session_pb2.Process(rank=rank, incarnation=uuid.uuid4().hex, host=host, pid=1 + rank)
            for rank in self._ranks
        ]
        await self._call.write(
            session_pb2.ConnectRequest(add_processes=session_pb2.AddProcesses(processes=processes))
        )
        await read_until(self._call, "processes_added")
        await self._join(world_size)
