"""Churns a real coordinator for half an hour, and says whether what it uses levels off.

    python -m benchmarks.soak --minutes 30

``muster serve`` on SQLite as a process of its own, which forgets runs soon. Jobs come and go on it the way
jobs do, well and badly; one job stays all the time. Ends with 1 if something still grows in the last third,
if the log holds an error, or if a call was answered as it must not be. Runs are kept for a minute, so that
less than some ten minutes show a beginning, which grows.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import psutil
import uvloop

from benchmarks.soaking.churn import Churn
from lab.processes.coordinator import Coordinator

KEEP_CLOSED = 30
KEEP_IDLE = 60
SESSION_TTL = 3.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What the coordinator uses at one time."""

    minutes: float
    rss_mib: float
    files: int
    threads: int
    database_mib: float
    runs: float
    sessions: float
    series: int
    cpu_percent: float
    errors: int


SLACK = {
    "rss_mib": (0.05, 3.0),
    "files": (0.15, 5.0),
    "threads": (0.0, 2.0),
    "database_mib": (0.10, 0.5),
    "runs": (0.15, 5.0),
    "sessions": (0.25, 5.0),
    "series": (0.15, 100.0),
}
"""How much larger the mean of the last third may be than that of the one before: a part of it, and a sum."""


def growth(samples: list[Sample]) -> Iterator[tuple[str, float, float, bool]]:
    """For each figure, its means in the middle and in the last third, and whether it levelled off."""
    third = len(samples) // 3
    for name, (part, most) in SLACK.items():
        middle, last = (
            statistics.fmean(getattr(sample, name) for sample in some)
            for some in (samples[third : 2 * third], samples[2 * third :])
        )
        yield name, middle, last, last <= middle * (1 + part) + most


async def sample(
    coordinator: Coordinator, process: psutil.Process, folder: Path, begin: float, web: aiohttp.ClientSession
) -> Sample:
    """Look at the coordinator once."""
    async with web.get(f"http://127.0.0.1:{coordinator.http_port}/metrics") as response:
        lines = [line for line in (await response.text()).splitlines() if not line.startswith("#")]

    def total(name: str) -> float:
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))

    faults = sum(
        line["level"] in ("error", "critical") or "Traceback" in str(line) for line in coordinator.log()
    )
    return Sample(
        minutes=(time.monotonic() - begin) / 60,
        rss_mib=process.memory_info().rss / 2**20,
        files=process.num_fds(),
        threads=process.num_threads(),
        database_mib=_size(folder) / 2**20,
        runs=total("muster_runs"),
        sessions=total("muster_sessions"),
        series=len(lines),
        cpu_percent=process.cpu_percent(),
        errors=faults,
    )


def _size(folder: Path) -> int:
    """The bytes of the database with its log."""
    return sum(one.stat().st_size for one in folder.glob("muster.db*"))


def show(one: Sample) -> None:
    """Print a line of the table."""
    figures = (getattr(one, field.name) for field in fields(one))
    print(" ".join(f"{figure:>12,.1f}" for figure in figures), flush=True)


async def soak(folder: Path, minutes: float, rate: float, interval: float, seed: int) -> list[str]:
    """Churn, and look at the coordinator on the way.

    Args:
        folder: for the database and the log.
        minutes: how long.
        rate: scenarios that begin in a second.
        interval: seconds between two looks.
        seed: of what comes.

    Returns:
        What is wrong.
    """
    keep = (f"--keep-closed-runs={KEEP_CLOSED}", f"--keep-idle-runs={KEEP_IDLE}")
    samples: list[Sample] = []
    with Coordinator(folder, session_ttl=SESSION_TTL, extra=keep) as coordinator:
        process, myself = psutil.Process(coordinator.pid), psutil.Process()
        async with aiohttp.ClientSession() as web:
            begin = time.monotonic()
            page = f"http://127.0.0.1:{coordinator.http_port}"
            churn = Churn(coordinator.endpoint, page, random.Random(seed), begin, web)

            async def look() -> None:
                process.cpu_percent()
                while True:
                    await asyncio.sleep(interval)
                    samples.append(await sample(coordinator, process, folder, begin, web))
                    show(samples[-1])

            print(" ".join(f"{field.name:>12}" for field in fields(Sample)), flush=True)
            looking = asyncio.create_task(look())
            try:
                await churn.run(rate, minutes * 60)
                assert not looking.done(), looking.exception()
            finally:
                looking.cancel()
            used = sum(process.cpu_times()[:2]), sum(myself.cpu_times()[:2])
            elapsed = time.monotonic() - begin
        wrong = [f"failed: {text}" for text in churn.failures]
        faults = [line for line in coordinator.log() if line["level"] in ("error", "critical")]
        wrong += [f"logged: {line}" for line in faults]
        if coordinator.stop():
            wrong.append("the coordinator did not end well")
    print(f"\nevery five minutes, of {elapsed / 60:.0f}:")
    print(" ".join(f"{field.name:>12}" for field in fields(Sample)))
    step = max(1, round(300 / interval))
    for one in samples[step - 1 :: step] or samples[-1:]:
        show(one)
    print(f"\n{'':>14} {'middle third':>14} {'last third':>14}")
    for name, middle, last, level in growth(samples):
        print(f"{name:>14} {middle:>14,.1f} {last:>14,.1f}  {'levelled off' if level else 'STILL GROWS'}")
        if not level:
            wrong.append(f"{name} still grows: {middle:,.1f} in the middle third, {last:,.1f} in the last")
    print(f"\nscenarios: {dict(churn.done)}; statuses: {dict(churn.answers)}")
    print(f"CPU: coordinator {used[0] / elapsed:.1%}, clients {used[1] / elapsed:.1%} of a core")
    return wrong


def main() -> None:
    """Read the arguments, and soak in a folder that is removed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=4.0, help="scenarios that begin in a second")
    parser.add_argument("--interval", type=float, default=15.0, help="seconds between two looks")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        wrong = runner.run(soak(Path(folder), options.minutes, options.rate, options.interval, options.seed))
    counted = Counter(wrong)
    for text, count in counted.most_common():
        print(f"{count} x {text}")
    print("wrong" if wrong else "all levelled off, nothing was logged, nothing failed")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
