"""Measure a whole job's start and restart at 1,024 to 65,536 ranks, and what such a start does to other runs.

Run it from the root of the repository: `python -m benchmarks.size`. A stream speaks for 8 ranks, as a relay's
does. The state is in SQLite.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import psutil

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.machine import describe_machine
from benchmarks.measuring.measure import cpu_seconds
from benchmarks.measuring.report import table
from benchmarks.peers import listens, muster_command
from benchmarks.peers.muster_relays import RANKS_PER_NODE
from lab.open_files import allow_many_files
from lab.processes.coordinator import free_port

SIZES = (1024, 16_384, 65_536)
LARGE = 16_384
"""Ranks that the targets are about."""
STEPS = ("enter", "join whole", "join half", "arrive whole", "arrive half")
LOADS = 2
"""Processes that play the ranks of the large job."""
RUNS = 998
"""Other runs beside the large one: with one that has ended, as many as a coordinator takes by default."""
CROWD_SECONDS = 90
QUIET_SECONDS = 5.0
RACKS = 16
"""Relays of racks for ``LARGE`` ranks: one for 128 nodes."""
POLL_SECONDS = 0.01
LAST = 19
"""The nice value of processes that run when no others want to."""


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
    streams: int
    """The streams of the coordinator."""
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


T = TypeVar("T")


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

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def pin(self, core: int) -> None:
        """Let it run on this core only."""
        self._stats.cpu_affinity([core])

    def kill(self) -> None:
        """End it by SIGKILL."""
        self._process.kill()
        self._process.wait()


class Job:
    """The ranks of one large job, in processes of their own.

    Args:
        ranks: how many.
        addresses: the coordinator's, or those of the relays of racks.
    """

    def __init__(self, ranks: int, addresses: Sequence[str]) -> None:
        bounds = [ranks * number // LOADS // RANKS_PER_NODE * RANKS_PER_NODE for number in range(LOADS)]
        self._loads = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.processes.size_ranks",
                    *map(str, (first, end, ranks)),
                    *addresses,
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
def job(port: int, ranks: int, racks: int, folder: Path) -> Iterator[Job]:
    """The ranks of a job, which end with the block.

    Args:
        port: the coordinator's.
        ranks: how many.
        racks: how many relays of racks are between the nodes and the coordinator.
        folder: for the relays' sockets.
    """
    with ExitStack() as ends:
        addresses = [f"127.0.0.1:{port}"]
        if racks:
            command = [sys.executable, "-m", "benchmarks.processes.relay_host", *addresses, str(racks)]
            relays = subprocess.Popen(
                [*command, str(folder), str(folder / "relays.json")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            ends.callback(relays.communicate)
            ends.callback(relays.kill)
            assert relays.stdout is not None
            if relays.stdout.readline() != "ready\n":
                raise RuntimeError("the relays did not start")
            addresses = [f"unix://{folder}/{number}.sock" for number in range(racks)]
        ranks_of_job = Job(ranks, addresses)
        ends.callback(ranks_of_job.kill)
        yield ranks_of_job


def start(ranks: int, folder: Path, racks: int = 0) -> Start:
    """Start a job, kill its coordinator, and start that again.

    Args:
        ranks: how many.
        folder: for the state.
        racks: how many relays of racks are between the nodes and the coordinator.
    """
    port, state = free_port(), folder / f"size-{ranks}-{racks}.db"
    coordinator = Coordinator(port, state)
    try:
        with job(port, ranks, racks, folder) as large:
            steps = tuple(_step(coordinator, large, name) for name in STEPS)
            state_bytes = sum(file.stat().st_size for file in folder.glob(state.name + "*"))
            peak = coordinator.peak_mib
            coordinator.kill()
            coordinator = Coordinator(port, state)
            large.do("close")
            again = sum(large.do(name) for name in STEPS)
            return Start(
                ranks,
                racks or ranks // RANKS_PER_NODE,
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


def delays(folder: Path, racks: int = 0) -> list[Delay]:
    """What each step of a large job's start does to the decisions of many other runs.

    The coordinator has a core of its own. The processes that play ranks share the others, and there the other
    runs come first, so that their figures show the coordinator's delays and not those of the players.

    Args:
        folder: for the state.
        racks: how many relays of racks the large job has.
    """
    port = free_port()
    coordinator = Coordinator(port, folder / f"delays-{racks}.db")
    own, *others = sorted(os.sched_getaffinity(0))
    coordinator.pin(own)
    os.sched_setaffinity(0, others)
    command = [sys.executable, "-m", "benchmarks.processes.crowd", str(port), "0"]
    try:
        crowd = subprocess.Popen(
            [*command, str(RUNS), str(RANKS_PER_NODE), str(CROWD_SECONDS)], stdout=subprocess.PIPE, text=True
        )
        assert crowd.stdout is not None
        with job(port, LARGE, racks, folder) as large:
            for process in psutil.Process().children(recursive=True):
                if process.pid not in (coordinator.pid, crowd.pid):
                    process.nice(LAST)
            if crowd.stdout.readline() != "joined\n":
                raise RuntimeError("the other runs did not join")
            time.sleep(1.0 + QUIET_SECONDS)  # Each run passes its first barrier within a second.
            windows = [("before", time.monotonic() - QUIET_SECONDS, time.monotonic())]
            for name in STEPS:
                began = time.monotonic()
                large.do(name)
                windows.append((name, began, time.monotonic()))
            windows.append(("the whole start", windows[1][1], windows[-1][2]))
            found = json.loads(crowd.communicate()[0])
    finally:
        os.sched_setaffinity(0, {own, *others})
        crowd.kill()
        coordinator.kill()
    return [_delay(name, began, ended, found) for name, began, ended in windows]


def _delay(name: str, began: float, ended: float, found: Sequence[tuple[float, float]]) -> Delay:
    waits = [wait for at, wait in found if began <= at <= ended]
    p99 = statistics.quantiles(waits, n=100, method="inclusive")[98]
    return Delay(name, ended - began, len(waits), statistics.median(waits), p99, max(waits))


@dataclass(frozen=True, slots=True)
class Measured:
    """All that the page shows."""

    starts: Sequence[Start]
    """The last one with relays of racks."""
    delays: Sequence[Delay]
    delays_with_racks: Sequence[Delay]


def page(results: Mapping[str, Any], measured: Measured) -> str:
    """The page of docs/benchmarks."""
    machine = results["machine"]
    starts, racked = measured.starts[:-1], measured.starts[-1]
    by_size = {one.ranks: one for one in starts}
    smallest, large = starts[0], by_size.get(LARGE)
    targets = []
    if large is not None:
        growth = (large.cpu_seconds / large.ranks) / (smallest.cpu_seconds / smallest.ranks)
        targets = [
            ("start of 16,384 ranks: coordinator's CPU", "3 s", f"{large.cpu_seconds:.2f} s"),
            ("the same without the second group", "3 s", f"{_without_half(large):.2f} s"),
            ("the same with both, through relays of racks", "3 s", f"{racked.cpu_seconds:.2f} s"),
            ("restart until it serves", "2 s", f"{large.serving_seconds:.2f} s"),
            ("peak memory, before and after the restart", "400 MiB", f"{_peak(large):.0f} MiB"),
            ("CPU for a rank, to that at 1,024 ranks", "1.2", f"{growth:.2f}"),
        ]
    for which, delays in (("", measured.delays), (", through relays of racks", measured.delays_with_racks)):
        before, whole = delays[0], delays[-1]
        figure = f"{whole.p99_ms:.0f} ms ({before.p99_ms:.0f} ms before the start)"
        targets.append((f"decisions of {RUNS} other runs during the start{which}, p99", "50 ms", figure))
    sizes = table(
        ("ranks", "streams", "coordinator's CPU", "for a rank", "start", "state", "peak", *STEPS),
        [
            (
                f"{one.ranks:,}",
                f"{one.streams:,}",
                f"{one.cpu_seconds:.2f} s",
                f"{one.cpu_seconds / one.ranks * 1e6:.0f} µs",
                f"{sum(step.seconds for step in one.steps):.2f} s",
                f"{one.state_bytes / 1e6:.1f} MB",
                f"{one.peak_mib:.0f} MiB",
                *(f"{step.cpu_seconds:.2f} s" for step in one.steps),
            )
            for one in measured.starts
        ],
    )
    restarts = table(
        ("ranks", "streams", "serves after", "all ranks passed a barrier", "coordinator's CPU", "peak"),
        [
            (
                f"{one.ranks:,}",
                f"{one.streams:,}",
                f"{one.serving_seconds:.2f} s",
                f"{one.again_seconds:.2f} s later",
                f"{one.again_cpu_seconds:.2f} s",
                f"{one.again_peak_mib:.0f} MiB",
            )
            for one in measured.starts
        ],
    )
    others = table(
        (
            "streams",
            "step of the large job",
            "it took",
            "decisions of the others",
            "median",
            "p99",
            "slowest",
        ),
        [
            (
                f"{streams:,}",
                one.step,
                f"{one.seconds:.2f} s",
                f"{one.decisions:,}",
                f"{one.median_ms:.1f} ms",
                f"{one.p99_ms:.0f} ms",
                f"{one.slowest_ms:.0f} ms",
            )
            for streams, delays in (
                (LARGE // RANKS_PER_NODE, measured.delays),
                (RACKS, measured.delays_with_racks),
            )
            for one in delays
        ],
    )
    return f"""# Large jobs

Measured on {results["date"]} by `python -m benchmarks.size`: {machine["processor"]}, {machine["cores"]}
cores, {machine["memory"]}. The coordinator and the processes that play the ranks share that machine. The
state is in SQLite on its disk.

{table(("What", "At most", "Measured"), targets)}
## Start

All ranks of a job at once: they enter on streams of {RANKS_PER_NODE} ranks each, as relays of nodes speak.
They join a group of the whole world, and every second rank joins a group of those. Each group passes a
barrier. The last columns are the coordinator's CPU for each step. In the last row, the relays of {RACKS}
racks carry the streams of 128 nodes each (docs/relay.md).

{sizes}
## Restart

The coordinator is killed with SIGKILL and started again on its state. All ranks come back at once, join both
groups and pass another barrier of each.

{restarts}
## What a large start does to other runs

{RUNS} runs of {RANKS_PER_NODE} ranks have a barrier a second each, at moments of their own, while a job of
{LARGE:,} ranks starts. The figures are the times from the last arrival to the decision, as the runs'
processes see them. The coordinator has one of the two cores. All processes that play ranks and relays share
the other one, where those of the other runs come first.

{others}
All messages of a step come at once. So a decision of another run waits for the messages that came before it,
and for the commit that these are in. 128 ranks of one run join at once (`rpc/join_turns.py`), and 128
sessions begin to write in one pass of the event loop (`rpc/write_pace.py`). Without the latter, the others'
p99 was 66 to 130 ms while all ranks arrived (three runs), and 57 to 67 ms with it (five runs).

## What is missed, and why

- The machines differ. A run on another one took 8.70 s of CPU for the start of 16,384 ranks, 2.87 s for the
  restart, and 507 ms for the p99. So compare the rows of one run with each other.
- CPU for a rank grew 1.05 to 1.33 times in several runs, and 1.03 to 1.13 times with relays of racks (three).
- Half of the CPU of a start is for its streams: to open one and let its 8 ranks enter takes 0.6 to 0.7 ms of
  the coordinator. More than half of that is gRPC's own work. On 2026-11-25, a `grpc.aio` server that only
  answered the same messages with fixed bytes took 1.7 s of CPU while the ranks entered, and 2.8 s for the
  whole start. The coordinator took 2.9 to 3.1 s and 5.5 to 6.2 s in the same minutes. Its core, without gRPC
  and storage, took 0.04 ms for a rank. Relays of racks save most of it: see the last row.
- Every join of a subset group carries the list of its participants. The coordinator decodes and keeps the
  list once, but it still receives and compares each copy. At 65,536 ranks these are 8,192 messages of 90 KB,
  or 740 MB that come at once. So the second group's join takes longer for a rank there, and more memory.
- Without relays of racks, the other runs' p99 misses its target: 47 to 80 ms in 11 runs (median: 60).
  gRPC hands over the messages of all streams in the order in which they came. A decision waits for up to
  2,048 messages. With relays of racks, and 512 ranks that joined at once, it was 18 to 69 ms (six runs).
"""


def _without_half(one: Start) -> float:
    return sum(step.cpu_seconds for step in one.steps if not step.name.endswith("half"))


def _peak(one: Start) -> float:
    return max(one.peak_mib, one.again_peak_mib)


def main() -> int:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="N", help="ranks")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/size.json"))
    parser.add_argument("--docs", type=Path, default=Path("docs/benchmarks/size.md"))
    given = parser.parse_args()
    allow_many_files()
    folder = given.output.resolve().parent
    results: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(folder),
    }
    with tempfile.TemporaryDirectory(dir=folder) as name:
        states = Path(name)
        measured = Measured(
            starts=[
                *(_told(start(ranks, states)) for ranks in given.sizes),
                _told(start(LARGE, states, RACKS)),
            ],
            delays=_told(delays(states)),
            delays_with_racks=_told(delays(states, RACKS)),
        )
    results |= asdict(measured)
    given.output.write_text(json.dumps(results, indent=1) + "\n")
    given.docs.write_text(page(results, measured))
    return 0


def _told(one: T) -> T:
    print(one, file=sys.stderr, flush=True)
    return one


if __name__ == "__main__":
    sys.exit(main())
