"""Relays for a benchmark, each on a socket of its own, in one process: `UPSTREAM COUNT FOLDER REPORT`.

It ends when its input does, and writes down what the relays took for each arrival.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import uvloop

from muster.relay.listen_address import parse_listen_address
from muster.relay.server import RelayConfig, start
from muster.relay.stats import RelayStats
from muster.service.version import VERSION


async def host(upstream: str, count: int, folder: Path, report: Path) -> None:
    """Run so many relays until the input ends."""
    stats = RelayStats()
    relays = [
        await start(
            RelayConfig(
                listen=parse_listen_address(f"unix://{folder}/{number}.sock"),
                upstream=upstream,
                name=f"node-{number}:{os.getpid()}",
                version=VERSION,
            ),
            stats,
        )
        for number in range(count)
    ]
    print("ready", flush=True)
    began = time.process_time()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    cpu = time.process_time() - began
    figures = {
        "cpu_us_per_arrival": cpu * 1e6 / max(stats.arrivals, 1),
        "arrivals_per_message": stats.arrivals / max(stats.messages, 1),
    }
    write_down(report, figures)
    assert relays


def write_down(report: Path, figures: dict[str, float]) -> None:
    """Leave it where the benchmark looks."""
    report.write_text(json.dumps(figures))


if __name__ == "__main__":
    upstream, count, folder, report = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(host(upstream, int(count), Path(folder), Path(report)))
        finally:
            # Its streams are of no interest any more.
            os._exit(0)
