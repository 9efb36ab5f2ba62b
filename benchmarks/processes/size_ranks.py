"""Play the ranks of one large job as their relays speak, a step at a time.

Its arguments are `FIRST LAST WORLD_SIZE ADDRESS...`. The addresses are the coordinator's, or those of the
relays of racks: each has the next 128 nodes.

Each line on the standard input is a step: `enter`, `join GROUP`, `arrive GROUP` or `close`. Each line on the
standard output tells that it is done. The groups are `whole` and `half`, which has every second rank.
"""

import asyncio
import sys
import uuid
from collections.abc import Sequence

import grpc.aio
import uvloop

from benchmarks.peers.base import BARRIER_TIMEOUT_S
from benchmarks.peers.muster import CHANNEL_OPTIONS, Kind, read_until
from benchmarks.peers.muster_relays import CONNECTING_AT_ONCE, RANKS_PER_NODE, nodes_of
from lab import aio
from muster.v1 import common_pb2, session_pb2

RUN_ID = "large"
NODES_OF_RACK = 128


class Node:
    """One node's stream, which outlives the coordinator.

    Args:
        address: the coordinator's, or that of its rack's relay.
        ranks: of the node.
        world_size: of the job.
    """

    def __init__(self, address: str, ranks: range, world_size: int) -> None:
        self._address = address
        self._world_size = world_size
        self._host = f"node-{ranks.start // RANKS_PER_NODE}"
        self._processes = [
            session_pb2.Process(rank=rank, incarnation=uuid.uuid4().hex, host=self._host, pid=1 + rank)
            for rank in ranks
        ]
        self._sequences: dict[str, int] = {}

    def _ranks(self, group: str) -> list[int]:
        return [one.rank for one in self._processes if group == "whole" or one.rank % 2 == 0]

    async def enter(self) -> None:
        """Open the stream; all ranks enter."""
        # Kept, for a channel that nobody holds is closed.
        self._channel = grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        self._call = aio.sessions(self._channel).Connect(wait_for_ready=True)
        hello = session_pb2.Hello(run_id=RUN_ID, protocol_version=1, relay=f"{self._host}:1")
        await self._say(session_pb2.ConnectRequest(hello=hello), "welcome")
        enter = session_pb2.AddProcesses(processes=self._processes)
        said = await self._say(session_pb2.ConnectRequest(add_processes=enter), "processes_added")
        for process, entry in zip(self._processes, said.processes_added.entries, strict=True):
            process.ordinal = entry.ordinal

    async def join(self, group: str) -> None:
        """Join a group."""
        participants = range(0, self._world_size, 2) if group == "half" else ()
        join = session_pb2.JoinGroup(
            prefix=group, world_size=self._world_size, participants=participants, ranks=self._ranks(group)
        )
        said = await self._say(session_pb2.ConnectRequest(join_group=join), "group_joined")
        if len(said.group_joined.positions) != len(join.ranks):
            raise RuntimeError(f"{len(said.group_joined.positions)} of {len(join.ranks)} ranks joined")
        self._sequences.setdefault(group, said.group_joined.positions[0].sequence)

    async def arrive(self, group: str) -> None:
        """Pass the next barrier of a group."""
        arrive = session_pb2.Arrive(
            prefix=group,
            sequence=self._sequences[group],
            timeout_ms=BARRIER_TIMEOUT_S * 1000,
            arrivals=[session_pb2.Arrival(rank=rank) for rank in self._ranks(group)],
        )
        said = await self._say(session_pb2.ConnectRequest(arrive=arrive), "decision")
        if said.decision.outcome != common_pb2.OUTCOME_RELEASED:
            raise RuntimeError(said.decision.message)
        self._sequences[group] += 1

    async def close(self) -> None:
        """Give up a stream that broke."""
        await self._channel.close()

    async def _say(self, message: session_pb2.ConnectRequest, wanted: Kind) -> session_pb2.ConnectResponse:
        await self._call.write(message)
        return await read_until(self._call, wanted)


async def play(addresses: Sequence[str], ranks: range, world_size: int) -> None:
    """Do what the standard input says."""

    def address(node: range) -> str:
        return addresses[node.start // (RANKS_PER_NODE * NODES_OF_RACK) % len(addresses)]

    nodes = [Node(address(one), one, world_size) for one in nodes_of(ranks)]
    at_once = asyncio.Semaphore(CONNECTING_AT_ONCE)

    async def enter(node: Node) -> None:
        async with at_once:
            await node.enter()

    while line := await asyncio.to_thread(sys.stdin.readline):
        match line.split():
            case ["enter"]:
                await asyncio.gather(*map(enter, nodes))
            case ["join", group]:
                await asyncio.gather(*(node.join(group) for node in nodes))
            case ["arrive", group]:
                await asyncio.gather(*(node.arrive(group) for node in nodes))
            case ["close"]:
                await asyncio.gather(*(node.close() for node in nodes))
        print("done", flush=True)


if __name__ == "__main__":
    first, last, world_size = map(int, sys.argv[1:4])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(play(sys.argv[4:], range(first, last), world_size))
