"""A peer that says as much as it can: ``python -m tests.support.hostile.flood PORT SOURCE RATE``.

It speaks from an address of its own, on some streams that each arrive at barriers of their own without
waiting for the outcome. A line on stdin ends it; it prints what it said, what it heard, and how long it took.
"""

import asyncio
import json
import sys
import time

import grpc

from lab import aio
from lab.processes.proxy import Proxy
from muster.v1 import session_pb2, session_pb2_grpc

STREAMS = 8


async def flood(
    stub: "session_pb2_grpc.SessionServiceAsyncStub",
    number: int,
    counts: dict[str, float],
    begun: asyncio.Event,
    rate: int,
) -> None:
    call = stub.Connect()
    process = session_pb2.Process(rank=0, incarnation=f"i{number}", host="flood", pid=1)
    hello = session_pb2.Hello(run_id=f"flood-{number}", processes=[process], protocol_version=1)
    await call.write(session_pb2.ConnectRequest(hello=hello))
    await call.write(session_pb2.ConnectRequest(join_group=session_pb2.JoinGroup(prefix="p", world_size=1)))

    async def say() -> None:
        sequence = 0
        while True:
            arrive = session_pb2.Arrive(
                prefix="p",
                sequence=sequence,
                timeout_ms=60_000,
                arrivals=[session_pb2.Arrival(rank=0, payload=bytes(100))],
            )
            await call.write(session_pb2.ConnectRequest(arrive=arrive))
            counts["said"] += 1
            sequence += 1

    saying = asyncio.create_task(say())
    try:
        while await call.read() is not grpc.aio.EOF:
            counts["heard"] += 1
            if counts["heard"] >= rate:
                begun.set()
    finally:
        saying.cancel()


async def main(port: int, source: str, rate: int) -> None:
    begun = asyncio.Event()
    counts: dict[str, float] = {"said": 0, "heard": 0, "streams": STREAMS}
    started = time.monotonic()
    with Proxy(port, source) as proxy:
        async with grpc.aio.insecure_channel(proxy.endpoint) as channel:
            stub = aio.sessions(channel)
            tasks = [
                asyncio.create_task(flood(stub, number, counts, begun, rate)) for number in range(STREAMS)
            ]
            await begun.wait()
            print("flooding", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            counts["seconds"] = time.monotonic() - started
            print(json.dumps(counts), flush=True)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
