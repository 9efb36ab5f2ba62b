"""Measure what the engines cost: barriers on memory, SQLite and an etcd of three members, in one run.

Run it from the root of the repository: `python -m benchmarks.engines`. How long one commit takes is measured
for each beside it.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.machine import describe_machine
from benchmarks.measuring.measure import MeasurementError, Options, Sample, measure
from benchmarks.peers import System, muster_command
from lab import records
from lab.leaders import successive_leaders
from lab.open_files import allow_many_files
from lab.processes.etcd import Cluster
from muster.service.storage import codec
from muster.service.storage.engine import Engine
from muster.service.storage.location import engine_for

TITLES = {"memory": "memory", "sqlite": "SQLite", "etcd": "etcd, three members"}
COMMITS = 1000


@dataclass(frozen=True, slots=True)
class Cost:
    """Barriers of so many ranks on one engine: each figure's median over the repeats."""

    engine: str
    ranks: int
    cpu_us: float
    """CPU time of the coordinator for each arrival."""
    release_p50_ms: float
    """From the last arrival to the last release."""
    release_p99_ms: float
    barrier_ms: float


@dataclass(frozen=True, slots=True)
class Commits:
    """How long the commit of one decision takes, in milliseconds."""

    engine: str
    p50: float
    p99: float


class Engines:
    """The engines, each with a place for a state of its own at every use.

    Args:
        folder: on the disk that is to be measured.
        etcd: the members.
    """

    def __init__(self, folder: Path, etcd: Cluster) -> None:
        self._folder = folder
        self._etcd = etcd
        self._numbers = count()

    def state(self, engine: str) -> str:
        """Where a new state of this engine is."""
        number = next(self._numbers)
        places = {
            "memory": "memory:",
            "sqlite": f"sqlite:///{self._folder / f'{number}.db'}",
            "etcd": self._etcd.state(f"state-{number}"),
        }
        return places[engine]

    def cost(self, engine: str, ranks: int, options: Options) -> Sample:
        """Measure barriers once."""

        def command(port: int, ranks: int, directory: Path) -> list[str]:
            return muster_command(port, self.state(engine))

        return measure(System(TITLES[engine], command, "benchmarks.peers.muster", _leads), ranks, options)

    def commits(self, name: str) -> Commits:
        """Commit one decision after the other."""
        state = self.state(name)
        if name != "etcd":
            return _commits(name, engine_for(state))
        with successive_leaders(state) as leaders:
            return _commits(name, leaders())


def _leads(port: int) -> bool:
    """Whether the coordinator on this port takes sessions."""
    request = health_pb2.HealthCheckRequest(service="muster.v1.SessionService")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=1)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _commits(name: str, engine: Engine) -> Commits:
    engine.open()
    took = []
    for sequence in range(COMMITS):
        writes = codec.encode_all([records.decision(sequence=sequence)]).writes
        began = time.perf_counter()
        engine.commit(writes)
        took.append((time.perf_counter() - began) * 1000)
    engine.close()
    return Commits(name, statistics.median(took), statistics.quantiles(took, n=100)[98])


def _median_of(engine: str, ranks: int, samples: list[Sample]) -> Cost:
    def median(figure: Callable[[Sample], float]) -> float:
        return statistics.median(map(figure, samples))

    return Cost(
        engine,
        ranks,
        cpu_us=median(lambda one: one.server_cpu_us_per_arrival),
        release_p50_ms=median(lambda one: one.release_p50_ms),
        release_p99_ms=median(lambda one: one.release_p99_ms),
        barrier_ms=median(lambda one: one.barrier_ms),
    )


def page(
    costs: list[Cost], commits: list[Commits], failures: list[str], repeats: int, machine: Mapping[str, str]
) -> str:
    """The page of docs/benchmarks."""
    lines = [
        "# What the engines cost",
        "",
        f"Measured on {datetime.now(UTC).date().isoformat()} by `python -m benchmarks.engines`: "
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory']}. The coordinator, the ranks "
        "and the three members of etcd share that machine and its disk, where SQLite and etcd write, with a "
        f"sync for each commit ({machine['write and fsync of 4 KiB there, median']} for 4 KiB). On machines "
        "of their own, etcd's members add a network's round trip or two to each commit, and take no "
        "processor from the coordinator.",
        "",
        "Barriers of sessions, back to back, as in [Barriers beside the peers](barrier.md). Figures are the "
        f"medians of {repeats}, with the engines in turn; in brackets, the ratio to memory.",
        "",
        "| ranks | engine | coordinator's CPU per arrival | last arrival to last release, p50 | p99 | "
        "one barrier |",
        "|-|-|-|-|-|-|",
    ]
    for one in costs:
        base = next(other for other in costs if (other.engine, other.ranks) == ("memory", one.ranks))
        lines.append(
            f"| {one.ranks:,} | {TITLES[one.engine]} | "
            f"{one.cpu_us:.0f} µs ({one.cpu_us / base.cpu_us:.2f}) | "
            f"{one.release_p50_ms:.1f} ms ({one.release_p50_ms / base.release_p50_ms:.2f}) | "
            f"{one.release_p99_ms:.1f} ms | {one.barrier_ms:.1f} ms |"
        )
    lines += [
        *(f"\nNot measured: {failure}" for failure in failures),
        "",
        "## One commit",
        "",
        f"Of one decision, {COMMITS:,} times, by nobody else at the time.",
        "",
        "| engine | p50 | p99 |",
        "|-|-|-|",
        *(f"| {TITLES[one.engine]} | {one.p50:.3f} ms | {one.p99:.3f} ms |" for one in commits),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 128, 1024], metavar="N")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of one measurement")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each; the median counts")
    parser.add_argument("--load-processes", type=int, default=4, help="processes that play the ranks")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/engines.json"))
    parser.add_argument("--docs", type=Path, default=Path("docs/benchmarks"))
    given = parser.parse_args()
    allow_many_files()
    directory = given.output.resolve().parent
    machine = describe_machine(directory)
    options = Options(given.seconds, given.load_processes, 1, directory)
    samples: dict[tuple[str, int], list[Sample]] = {}
    failures: list[str] = []
    with tempfile.TemporaryDirectory(dir=directory) as folder, Cluster(Path(folder), 3) as etcd:
        engines = Engines(Path(folder), etcd)
        commits = [engines.commits(engine) for engine in TITLES]
        for one in commits:
            print(one, flush=True)
        for _ in range(given.repeats):
            for ranks in given.ranks:
                for engine in TITLES:
                    try:
                        sample = engines.cost(engine, ranks, options)
                    except MeasurementError as error:
                        print(engine, ranks, f"failed: {error}", flush=True)
                        failures.append(f"{TITLES[engine]}, {ranks:,} ranks: {error}")
                    else:
                        samples.setdefault((engine, ranks), []).append(sample)
                        print(engine, ranks, sample, flush=True)
    costs = [_median_of(engine, ranks, found) for (engine, ranks), found in samples.items()]
    results = {
        "machine": machine,
        "costs": [asdict(one) for one in costs],
        "commits": [asdict(one) for one in commits],
    }
    given.output.write_text(json.dumps(results, indent=2) + "\n")
    (given.docs / "engines.md").write_text(page(costs, commits, failures, given.repeats, machine))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
