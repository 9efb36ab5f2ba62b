"""Measure a whole job's start and restart at 1,024 to 65,536 ranks, and what such a start does to other runs.

Run it from the root of the repository: `python -m benchmarks.size`. A stream speaks for 8 ranks, as a relay's
does. The state is in SQLite.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import psutil

from benchmarks.measuring.machine import describe_machine
from benchmarks.measuring.measure import cpu_seconds
from benchmarks.measuring.report import table
from benchmarks.peers import listens, muster_command
from benchmarks.peers.muster_lines import RANKS_PER_NODE
from lab.patience import until
from lab.processes.coordinator import free_port

SIZES = (1024, 16_384, 65_536)
LARGE = 16_384
"""Ranks that the targets are about."""
STEPS = ("enter", "join whole", "join half", "arrive whole", "arrive half")
LOADS = 2
"""Processes that play the ranks of the large job."""
RUNS = 998
"""Other runs beside the large one: with one that has ended, as many as a coordinator takes by default."""
CROWD_SECONDS = 25
QUIET_SECONDS = 5.0
POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a start, of all ranks at once."""

    name: str
    seconds: float
    """Until the last rank was answered."""
    cpu_seconds: float
    """CPU seconds of the coordinator."""


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a job of so many ranks, the loss of its coordinator, and the way back."""

    ranks: int
    steps: tuple[Step, ...]
    state_bytes: int
    """On disk, the write-ahead log included."""
    peak_mib: float
    """Resident memory of the coordinator, at most."""
    serving_seconds: float
    """From the start of the next coordinator's process until it accepts connections."""
    again_seconds: float
    """From then on until all ranks have come back and passed a barrier of both groups."""
    again_cpu_seconds: float
    """CPU seconds of the next coordinator, with its start."""
    again_peak_mib: float

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of the coordinator for the whole start."""
        return sum(step.cpu_seconds for step in self.steps)


@dataclass(frozen=True, slots=True)
class Delay:
    """How long decisions of the other runs took during one step of the large job, in milliseconds."""

    step: str
    seconds: float
    decisions: int
    median_ms: float
    p99_ms: float
    slowest_ms: float


T = TypeVar("T", Start, Delay)


class Coordinator:
    """A coordinator process on a port.

    Args:
        port: its own.
        state: its SQLite file.
    """

    def __init__(self, port: int, state: Path) -> None:
        began = time.monotonic()
        command = muster_command(port, f"sqlite:///{state}")
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._stats = psutil.Process(self._process.pid)
        while not listens(port):
            if self._process.poll() is not None:
                raise RuntimeError(f"the coordinator ended with {self._process.returncode}")
            time.sleep(POLL_SECONDS)
        self.serving_seconds = time.monotonic() - began

    @property
    def cpu_seconds(self) -> float:
        """That it has used."""
        return cpu_seconds(self._stats)

    @property
    def peak_mib(self) -> float:
        """Its largest resident memory so far (VmHWM)."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
        return int(peak) / 1024

    def kill(self) -> None:
        """End it by SIGKILL."""
        self._process.kill()
        self._process.wait()


class Job:
    """The ranks of one large job, in processes of their own.

    Args:
        port: the coordinator's.
        ranks: how many.
    """

    def __init__(self, port: int, ranks: int) -> None:
        bounds = [ranks * number // LOADS // RANKS_PER_NODE * RANKS_PER_NODE for number in range(LOADS)]
        self._loads = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.processes.size_ranks",
                    *map(str, (port, first, end, ranks)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for first, end in pairwise([*bounds, ranks])
        ]

    def do(self, step: str) -> float:
        """Let all ranks take a step. Returns the seconds until the last was done."""
        began = time.monotonic()
        for load in self._loads:
            assert load.stdin is not None
            load.stdin.write(step + "\n")
            load.stdin.flush()
        for load in self._loads:
            assert load.stdout is not None
            if load.stdout.readline() != "done\n":
                raise RuntimeError(f"the ranks failed at: {step}")
        return time.monotonic() - began

    def kill(self) -> None:
        """End the processes."""
        for load in self._loads:
            load.kill()
            load.communicate()


@contextmanager
def job(port: int, ranks: int) -> Iterator[Job]:
    """The ranks of a job, which end with the block."""
    ranks_of_job = Job(port, ranks)
    try:
        yield ranks_of_job
    finally:
        ranks_of_job.kill()


def start(ranks: int, folder: Path) -> Start:
    """Start a job, kill its coordinator, and start that again.

    Args:
        ranks: how many.
        folder: for the state.
    """
    port, state = free_port(), folder / f"size-{ranks}.db"
    coordinator = Coordinator(port, state)
    try:
        with job(port, ranks) as large:
            steps = tuple(_step(coordinator, large, name) for name in STEPS)
            state_bytes = sum(file.stat().st_size for file in folder.glob(state.name + "*"))
            peak = coordinator.peak_mib
            coordinator.kill()
            coordinator = Coordinator(port, state)
            large.do("close")
            again = sum(large.do(name) for name in STEPS)
            return Start(
                ranks,
                steps,
                state_bytes,
                peak,
                coordinator.serving_seconds,
                again,
                coordinator.cpu_seconds,
                coordinator.peak_mib,
            )
    finally:
        coordinator.kill()


def _step(coordinator: Coordinator, large: Job, name: str) -> Step:
    before = coordinator.cpu_seconds
    seconds = large.do(name)
    return Step(name, seconds, coordinator.cpu_seconds - before)


def delays(folder: Path) -> list[Delay]:
    """What each step of a large job's start does to the decisions of many other runs.

    Args:
        folder: for the state.
    """
    port = free_port()
    coordinator = Coordinator(port, folder / "delays.db")
    command = [sys.executable, "-m", "benchmarks.processes.crowd", str(port), "0"]
    try:
        crowd = subprocess.Popen(
            [*command, str(RUNS), str(RANKS_PER_NODE), str(CROWD_SECONDS)], stdout=subprocess.PIPE, text=True
        )
        with job(port, LARGE) as large:
            until(lambda: _runs(port) >= RUNS, "the other runs do not begin")
            time.sleep(QUIET_SECONDS)
            windows = [("before", time.monotonic() - QUIET_SECONDS, time.monotonic())]
            for name in STEPS:
                began = time.monotonic()
                large.do(name)
                windows.append((name, began, time.monotonic()))
            windows.append(("the whole start", windows[1][1], windows[-1][2]))
            found = json.loads(crowd.communicate()[0])
    finally:
        crowd.kill()
        coordinator.kill()
    return [_delay(name, began, ended, found) for name, began, ended in windows]


def _runs(port: int) -> int:
    """How many streams are connected, one for each other run."""
    connections = psutil.net_connections("tcp")
    open_ones = [one for one in connections if one.status == psutil.CONN_ESTABLISHED]
    return sum(getattr(one.laddr, "port", None) == port for one in open_ones)


def _delay(name: str, began: float, ended: float, found: Sequence[tuple[float, float]]) -> Delay:
    waits = [wait for at, wait in found if began <= at <= ended]
    p99 = statistics.quantiles(waits, n=100, method="inclusive")[98]
    return Delay(name, ended - began, len(waits), statistics.median(waits), p99, max(waits))


def page(results: Mapping[str, Any], starts: Sequence[Start], delayed: Sequence[Delay]) -> str:
    """The page of docs/benchmarks."""
    machine = results["machine"]
    by_size = {one.ranks: one for one in starts}
    smallest, large = starts[0], by_size.get(LARGE)
    targets = []
    if large is not None:
        growth = (large.cpu_seconds / large.ranks) / (smallest.cpu_seconds / smallest.ranks)
        targets = [
            ("start of 16,384 ranks: coordinator's CPU", "3 s", f"{large.cpu_seconds:.2f} s"),
            ("the same without the second group", "3 s", f"{_without_half(large):.2f} s"),
            ("restart until it serves", "2 s", f"{large.serving_seconds:.2f} s"),
            ("peak memory, before and after the restart", "400 MiB", f"{_peak(large):.0f} MiB"),
            ("CPU for a rank, to that at 1,024 ranks", "1.2", f"{growth:.2f}"),
        ]
    if delayed:
        whole, before = delayed[-1], delayed[0]
        told = f"{whole.p99_ms:.0f} ms ({before.p99_ms:.0f} ms before the start)"
        targets.append((f"decisions of {RUNS} other runs during the start, p99", "50 ms", told))
    sizes = table(
        ("ranks", "streams", "coordinator's CPU", "for a rank", "start", "state", "peak", *STEPS),
        [
            (
                f"{one.ranks:,}",
                f"{one.ranks // RANKS_PER_NODE:,}",
                f"{one.cpu_seconds:.2f} s",
                f"{one.cpu_seconds / one.ranks * 1e6:.0f} µs",
                f"{sum(step.seconds for step in one.steps):.2f} s",
                f"{one.state_bytes / 1e6:.1f} MB",
                f"{one.peak_mib:.0f} MiB",
                *(f"{step.cpu_seconds:.2f} s" for step in one.steps),
            )
            for one in starts
        ],
    )
    restarts = table(
        ("ranks", "serves after", "all ranks passed a barrier", "coordinator's CPU", "peak"),
        [
            (
                f"{one.ranks:,}",
                f"{one.serving_seconds:.2f} s",
                f"{one.again_seconds:.2f} s later",
                f"{one.again_cpu_seconds:.2f} s",
                f"{one.again_peak_mib:.0f} MiB",
            )
            for one in starts
        ],
    )
    others = table(
        ("step of the large job", "it took", "decisions of the others", "median", "p99", "slowest"),
        [
            (
                one.step,
                f"{one.seconds:.2f} s",
                f"{one.decisions:,}",
                f"{one.median_ms:.1f} ms",
                f"{one.p99_ms:.0f} ms",
                f"{one.slowest_ms:.0f} ms",
            )
            for one in delayed
        ],
    )
    return f"""# Large jobs

Measured on {results["date"]} by `python -m benchmarks.size`: {machine["processor"]}, {machine["cores"]}
cores, {machine["memory"]}. The coordinator and the processes that play the ranks share that machine. The
state is in SQLite on its disk.

{table(("What", "At most", "Measured"), targets)}
## Start

All ranks of a job at once: they enter on streams of {RANKS_PER_NODE} ranks each, as relays speak. They join a
group of the whole world, and every second rank joins a group of those. Each group passes a barrier. The last
columns are the coordinator's CPU for each step.

{sizes}
## Restart

The coordinator is killed with SIGKILL and started again on its state. All ranks come back at once, join both
groups and pass another barrier of each.

{restarts}
## What a large start does to other runs

{RUNS} runs of {RANKS_PER_NODE} ranks have a barrier a second each, at moments of their own, while a job of
{LARGE:,} ranks starts. The figures are the times from the last arrival to the decision, as the runs'
processes see them. Three processes play ranks on the two cores that the coordinator runs on.

{others}
All messages of a step come at once. So a decision of another run waits for the messages that came before it,
and for the commit that these are in. Of one run, 64 streams join at once (`rpc/join_turns.py`). In a run of
2026-11-25 without that bound and with it, the p99 was 470 and 131 ms while the whole world joined, 455 and
205 ms during the whole start, and 120 and 142 ms before it.

## What is missed, and why

- Half of the CPU of a start is for its streams: to open one and let its 8 ranks enter takes about 1 ms of the
  coordinator. More than half of that is gRPC's own work. On 2026-11-25, a `grpc.aio` server that only
  answered the same messages with fixed bytes took 1.7 s of CPU while the ranks entered, and 2.8 s for the
  whole start. The coordinator took 2.9 to 3.1 s and 5.5 to 6.2 s in the same minutes. The machine was slower
  then than for the table. The coordinator's core, without gRPC and storage, took 0.04 ms for a rank.
- Every join of a subset group carries the list of its participants. The coordinator decodes and keeps the
  list once, but it still receives and compares each copy. At 65,536 ranks these are 8,192 messages of 90 KB,
  or 740 MB that come at once. So the second group's join takes longer for a rank there, and more memory.
  Since the tables were measured, a join that waits for its turn frees its bytes. In one run of 2026-11-25
  without that and with it, the peak was 488 and 336 MiB at 32,768 ranks, and 244 and 216 MiB at 16,384.
- The other runs' decisions are beyond their target before the large job starts: {RUNS} barriers a second take
  most of the coordinator's core, and the processes that play the ranks share the two cores. The large job
  adds to that, since each of its nodes sends a message at one moment. Only joins take turns, not arrivals.
"""


def _without_half(one: Start) -> float:
    return sum(step.cpu_seconds for step in one.steps if not step.name.endswith("half"))


def _peak(one: Start) -> float:
    return max(one.peak_mib, one.again_peak_mib)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="N", help="ranks")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/size.json"))
    parser.add_argument("--docs", type=Path, default=Path("docs/benchmarks/size.md"))
    given = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    folder = given.output.resolve().parent
    results: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(folder),
    }
    with tempfile.TemporaryDirectory(dir=folder) as states:
        starts = [_told(start(ranks, Path(states))) for ranks in given.sizes]
        delayed = [_told(one) for one in delays(Path(states))]
    results |= {"starts": [asdict(one) for one in starts], "delays": [asdict(one) for one in delayed]}
    given.output.write_text(json.dumps(results, indent=1) + "\n")
    given.docs.write_text(page(results, starts, delayed))
    return 0


def _told(one: T) -> T:
    print(one, file=sys.stderr, flush=True)
    return one


if __name__ == "__main__":
    sys.exit(main())
