"""Many ranks in one process, on an asyncio client: ``python -m lab.crowd ENDPOINT ...``.

Each rank has a connection and a session of its own, and goes through some barriers as a worker does.
Prints one line of JSON: for every barrier, the set of outcomes that its ranks heard.
"""

import asyncio
import json
import sys
from collections import defaultdict

import grpc
import uvloop

from lab import aio
from lab.open_files import allow_many_files
from muster.v1 import common_pb2, session_pb2

CONNECTING_AT_ONCE = 50


async def rank(
    endpoint: str,
    number: int,
    world_size: int,
    barriers: int,
    connecting: asyncio.Semaphore,
    heard: dict[int, set[str]],
    run_id: str,
) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(endpoint, options=options) as channel:
        async with connecting:
            call = aio.sessions(channel).Connect()
            process = session_pb2.Process(rank=number, incarnation=f"i{number}", host="crowd", pid=1)
            hello = session_pb2.Hello(run_id=run_id, processes=[process], protocol_version=1)
            await call.write(session_pb2.ConnectRequest(hello=hello))
            await _next(call, "welcome")
            join = session_pb2.JoinGroup(prefix="all", world_size=world_size)
            await call.write(session_pb2.ConnectRequest(join_group=join))
            joined = await _next(call, "group_joined")
        sequence = joined.group_joined.positions[0].sequence
        for _ in range(barriers):
            arrive = session_pb2.Arrive(
                prefix="all",
                sequence=sequence,
                timeout_ms=120_000,
                arrivals=[session_pb2.Arrival(rank=number)],
            )
            await call.write(session_pb2.ConnectRequest(arrive=arrive))
            decision = (await _next(call, "decision")).decision
            assert decision.sequence == sequence
            heard[sequence].add(common_pb2.Outcome.Name(decision.outcome) + decision.message)
            sequence += 1
        await call.write(session_pb2.ConnectRequest(goodbye=session_pb2.Goodbye()))
        await call.done_writing()


async def _next(
    call: grpc.aio.StreamStreamCall[session_pb2.ConnectRequest, session_pb2.ConnectResponse], kind: str
) -> session_pb2.ConnectResponse:
    while True:
        response = await aio.read(call)
        assert response is not None, "the session ended"
        if response.WhichOneof("message") == kind:
            return response


async def crowd(
    endpoint: str, first: int, count: int, world_size: int, barriers: int, run_id: str = "crowd"
) -> None:
    connecting = asyncio.Semaphore(CONNECTING_AT_ONCE)
    heard: dict[int, set[str]] = defaultdict(set)
    async with asyncio.TaskGroup() as ranks:
        for number in range(first, first + count):
            ranks.create_task(rank(endpoint, number, world_size, barriers, connecting, heard, run_id))
    print(json.dumps({sequence: sorted(outcomes) for sequence, outcomes in heard.items()}))


if __name__ == "__main__":
    allow_many_files()
    endpoint, first, count, world_size, barriers, *run_id = sys.argv[1:]
    uvloop.run(crowd(endpoint, int(first), int(count), int(world_size), int(barriers), *run_id))
