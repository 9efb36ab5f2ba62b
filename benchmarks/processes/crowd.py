"""Runs on lines of eight ranks, each with a barrier a second: `PORT NUMBER RUNS RANKS SECONDS`.

It prints two figures of each decision, as JSON: when its last arrival was sent, in seconds on
CLOCK_MONOTONIC, and how many milliseconds it took from then on.
"""

import asyncio
import json
import random
import sys

import uvloop

from benchmarks.peers.base import RoundTimes
from benchmarks.peers.muster_lines import Line, nodes_of


async def job(port: int, run_id: str, ranks: int, seconds: float) -> list[tuple[float, float]]:
    """One run, from its begin at a moment of its own."""
    lines = [Line(node, port, run_id) for node in nodes_of(range(ranks))]
    await asyncio.gather(*(line.join(ranks) for line in lines))
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
    jobs = (job(port, f"run-{number}-{one}", ranks, seconds) for one in range(runs))
    print(json.dumps([wait for waits in await asyncio.gather(*jobs) for wait in waits]))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
