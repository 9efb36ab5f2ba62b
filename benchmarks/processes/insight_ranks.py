"""Ranks that only hold sessions, and say what they do when they are asked: `PORT FIRST COUNT DIFFERENT`.

They print a line when all are welcomed. The first `DIFFERENT` of them stand elsewhere than the others.
"""

import asyncio
import sys

import grpc
import uvloop

from lab import aio
from muster.v1 import session_pb2 as pb
from muster.v1.insight_pb2 import Frame, Inspected, Report, Thread

RUN = "insight"
FRAMES = 20
"""Of a main thread: about as many as of a training loop in a collective."""


def report(line: int) -> Report:
    """What a process says that stands at this line."""
    inner = [
        Frame(
            function=f"function_{n}",
            file=f"/usr/lib/python3/site-packages/torch/module_{n}.py",
            line=n,
            library=True,
        )
        for n in range(FRAMES - 2)
    ]
    own = [
        Frame(function="train", file="/job/train.py", line=line),
        Frame(function="<module>", file="/job/train.py"),
    ]
    main = Thread(name="MainThread", main=True, frames=[*inner, *own])
    return Report(threads=[main], threads_left_out=30, cpu_ms=50, cpu_over_ms=5_000, resident_bytes=12 << 30)


async def rank(port: int, number: int, line: int, welcomed: asyncio.Semaphore) -> None:
    """One of them, until it is killed."""
    process = pb.Process(
        rank=number, incarnation=f"life-{number}", host=f"node-{number // 8}", pid=number + 1
    )
    hello = pb.Hello(run_id=RUN, processes=[process], protocol_version=1)
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        call = aio.sessions(channel).Connect()
        await call.write(pb.ConnectRequest(hello=hello))
        while True:
            heard = await call.read()
            assert isinstance(heard, pb.ConnectResponse)
            if heard.HasField("welcome"):
                welcomed.release()
            elif heard.HasField("inspect"):
                answer = Inspected(question=heard.inspect.question, rank=number, report=report(line))
                await call.write(pb.ConnectRequest(inspected=answer))


async def main() -> None:
    """Play them all."""
    port, first, count, different = map(int, sys.argv[1:5])
    welcomed = asyncio.Semaphore(0)
    async with asyncio.TaskGroup() as ranks:
        for number in range(count):
            line = number if number < different else 214
            ranks.create_task(rank(port, first + number, line, welcomed))
        for _ in range(count):
            await welcomed.acquire()
        print("welcomed", flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
