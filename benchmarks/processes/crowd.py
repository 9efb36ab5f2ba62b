"""Runs on streams of eight ranks, each with a barrier a second: `PORT NUMBER RUNS RANKS SECONDS`.

It prints `joined` when all runs have joined. At the end it prints two figures of each decision, as JSON: when
its last arrival was sent, in seconds on CLOCK_MONOTONIC, and how many milliseconds later the decision came.
"""

import asyncio
import json
import random
import sys

import uvloop

from benchmarks.peers.base import RoundTimes
from benchmarks.peers.muster_relays import CONNECTING_AT_ONCE, RelayStream, nodes_of


async def pass_barriers(lines: list[RelayStream], seconds: float) -> list[tuple[float, float]]:
    """The barriers of one run, from a moment of its own on."""
    await asyncio.sleep(random.uniform(0.0, 1.0))
    waits = []
    for _ in range(round(seconds)):
        pause = asyncio.create_task(asyncio.sleep(1.0))
        times = RoundTimes.of_ranks(await asyncio.gather(*(line.pass_barriers(1) for line in lines)))
        (arrived,), (released,) = times.last_arrivals_ns, times.last_releases_ns
        waits.append((arrived / 1e9, (released - arrived) / 1e6))
        await pause
    return waits


async def main() -> None:
    """Play the runs, all at once."""
    port, number, runs, ranks = map(int, sys.argv[1:5])
    seconds = float(sys.argv[5])
    jobs = [
        [RelayStream(node, port, f"run-{number}-{one}") for node in nodes_of(range(ranks))]
        for one in range(runs)
    ]
    at_once = asyncio.Semaphore(CONNECTING_AT_ONCE)

    async def join(lines: list[RelayStream]) -> None:
        async with at_once:
            await asyncio.gather(*(line.join(ranks) for line in lines))

    await asyncio.gather(*map(join, jobs))
    print("joined", flush=True)
    waits = await asyncio.gather(*(pass_barriers(lines, seconds) for lines in jobs))
    print(json.dumps([wait for of_job in waits for wait in of_job]))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
