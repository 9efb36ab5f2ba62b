"""Makes many short runs on one coordinator, and shows that neither its file nor its memory grows with them.

    python -m benchmarks.retention --runs 100000

The real driver, core, metrics and SQLite, without the network. Each run has four ranks that meet at three
barriers, write a store key each, and leave; the run is forgotten some seconds later. It takes a few minutes.
"""

import argparse
import asyncio
import time
from collections.abc import Set as AbstractSet
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import uvloop
from prometheus_client import generate_latest

from muster.service.clock import SystemClock
from muster.service.core.retention.retention import Retention
from muster.service.core.vocabulary.effects import NO_RANKS, Message
from muster.service.core.vocabulary.events import (
    Arrival,
    Arrive,
    Goodbye,
    Hello,
    JoinGroup,
    ProcessInfo,
    StoreRequest,
)
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import Decision
from muster.service.core.vocabulary.operations import Done, OperationId, Set
from muster.service.driver import Driver, Outgoing
from muster.service.rpc.codec import encode_session_message
from muster.service.storage.sqlite import SqliteEngine
from muster.service.telemetry.metrics import Metrics
from muster.service.telemetry.state_collector import StateCollector

RANKS = 4
BARRIERS = 3
AT_ONCE = 16
"""Runs that go on beside each other."""
LAG_INTERVAL = 0.02
VALUE = bytes(256)


class Speaker:
    """One stream or call, which waits for a message of one kind at a time."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._told: asyncio.Queue[Message] = asyncio.Queue()
        self.id = driver.connect(self)

    def deliver(self, outgoing: Outgoing, ranks: AbstractSet[int] = NO_RANKS) -> None:
        """Take a message."""
        self._told.put_nowait(outgoing.message)

    async def hears(self, kind: type[Message]) -> None:
        """Wait for a message of this kind; the others are of no interest."""
        while not isinstance(await self._told.get(), kind):
            pass

    def close(self) -> None:
        """End it."""
        self._driver.disconnect(self.id)


async def live(driver: Driver, run_id: str) -> None:
    """One run, from its first hello to its last goodbye."""
    stream, call = Speaker(driver), Speaker(driver)
    processes = tuple(ProcessInfo(rank, f"life-{rank}", "node-0", 4000 + rank) for rank in range(RANKS))
    driver.submit(Hello(stream.id, run_id, 0, processes))
    driver.submit(JoinGroup(stream.id, "checkpoint", RANKS))
    for sequence in range(BARRIERS):
        arrivals = tuple(Arrival(rank) for rank in range(RANKS))
        driver.submit(Arrive(stream.id, "checkpoint", sequence, 300.0, arrivals))
        await stream.hears(Decision)
    for rank in range(RANKS):
        operation = Set(((f"rank-{rank}", VALUE),), OperationId(f"client-{rank}", 1))
        driver.submit(StoreRequest(call.id, run_id, operation))
        await call.hears(Done)
    driver.submit(Goodbye(stream.id))
    stream.close()
    call.close()


class Lag:
    """The longest time that the loop was late, since it was begun last."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start to measure from now on."""
        self._worst = 0.0
        self._begin = time.monotonic()
        self._due = asyncio.get_running_loop().call_later(LAG_INTERVAL, self._look)

    def _look(self) -> None:
        worst = max(self._worst, time.monotonic() - self._begin - LAG_INTERVAL)
        self.restart()
        self._worst = worst

    def take(self) -> float:
        """Return the worst lag in seconds, and stop measuring until the restart."""
        self._due.cancel()
        return self._worst


async def measure(folder: Path, count: int, rate: float, keep: float, reports: int) -> None:
    """Make the runs, and print how large everything is on the way.

    Args:
        folder: where the database goes.
        count: how many runs.
        rate: how many begin in a second, if the machine can.
        keep: seconds that a run is kept that nobody uses; 0 keeps all, for comparison.
        reports: how many lines to print.
    """
    path = folder / "muster.db"
    metrics = Metrics()
    clock = SystemClock()
    driver = Driver(
        SqliteEngine(path),
        clock=clock,
        observer=metrics,
        encode=encode_session_message,
        session_ttl=10.0,
        limits=Limits(max_runs=count + 1),
        retention=Retention(closed=keep, idle=keep),
    )
    metrics.registry.register(StateCollector(driver.coordinator, metrics, clock))
    process, lag = psutil.Process(), Lag()
    begin = time.monotonic()

    def report(done: int) -> None:
        late = lag.take()
        series = generate_latest(metrics.registry).count(b"{")
        files = sum(one.stat().st_size for one in folder.iterdir())
        print(
            f"{done:>9,} {time.monotonic() - begin:>8.1f} {len(driver.coordinator.runs):>9,} "
            f"{path.stat().st_size / 2**20:>9.1f} {files / 2**20:>11.1f} "
            f"{process.memory_info().rss / 2**20:>8.0f} {series:>8,} {late * 1000:>13.0f}",
            flush=True,
        )
        # The scrape itself takes the loop's time, and is not what is looked at here.
        asyncio.get_running_loop().call_soon(lag.restart)

    print("runs made  seconds  runs known  file MiB  with log MiB  RSS MiB  series  worst lag ms")
    numbers = iter(range(count))
    done = 0

    async def worker() -> None:
        nonlocal done
        for number in numbers:
            await asyncio.sleep(max(0.0, begin + number / rate - time.monotonic()))
            await live(driver, f"job-{number:06}")
            done += 1
            if done % (count // reports) == 0:
                report(done)

    report(0)
    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    changed = driver.watch()
    while keep and driver.coordinator.runs:
        changed.clear()
        await changed.wait()
    report(done)
    await driver.close()


def main() -> None:
    """Read the arguments, and measure in a folder that is removed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=400.0, help="runs that begin in a second")
    parser.add_argument("--keep", type=float, default=5.0, help="seconds; 0 keeps every run")
    parser.add_argument("--reports", type=int, default=20)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(Path(folder), arguments.runs, arguments.rate, arguments.keep, arguments.reports))


if __name__ == "__main__":
    main()
