"""Measure the relay: what a node's folded stream costs the coordinator, beside the peers, in one run.

Run it from the root of the repository: `python -m benchmarks.relay`.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.machine import describe_machine
from benchmarks.measuring.measure import MeasurementError, Options, measure
from benchmarks.measuring.report import table
from benchmarks.peers import SYSTEMS, System, muster_command
from benchmarks.peers.muster_relayed import REPORTS
from lab.open_files import allow_many_files
from lab.patience import until
from lab.processes.coordinator import free_port


def _coordinator(port: int, ranks: int, directory: Path) -> list[str]:
    return [*muster_command(port, "memory:"), "--max-sessions=40000"]


BESIDE: dict[str, System] = {
    "TCPStore": SYSTEMS["tcpstore"],
    "JAX coordination service": SYSTEMS["jax"],
    "Muster, a stream for each rank": SYSTEMS["muster-memory"],
    "Muster, through relays": System("relays", _coordinator, "benchmarks.peers.muster_relayed"),
    "Muster, as relays speak": System("lines", _coordinator, "benchmarks.peers.muster_relays"),
}
DIRECT, RELAYED, LINES = list(BESIDE)[2:]
RANKS = 1024
GROWTH = (1024, 4096, 16_384, 65_536)
TIMES = 2_000
"""Operations of the store."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Barriers of so many ranks: each figure's median over the repeats."""

    system: str
    ranks: int
    connections: int
    cpu_us: float
    """CPU time of the coordinator for each arrival."""
    barrier_ms: float
    release_p99_ms: float
    """From the last arrival to the last release."""
    memory_kib: float
    """Memory of the coordinator for each rank."""


@dataclass(frozen=True, slots=True)
class RelayCost:
    """What relays took themselves."""

    nodes: int
    cpu_us: float
    """For each arrival."""
    arrivals_per_message: float


@dataclass(frozen=True, slots=True)
class AgentMemory:
    """An agent's resident memory, in MiB."""

    without: float
    with_relay: float


@dataclass(frozen=True, slots=True)
class ManyRuns:
    """Many runs at once, each with a barrier a second: the decisions, after their last arrivals."""

    runs: int
    ranks: int
    barriers: int
    median_ms: float
    p99_ms: float
    slowest_ms: float


def cost(name: str, ranks: int, repeats: int, options: Options) -> Cost:
    """Measure barriers."""
    samples = []
    for _ in range(repeats):
        sample = measure(BESIDE[name], ranks, options)
        print(name, ranks, sample, file=sys.stderr, flush=True)
        samples.append(sample)

    def median(field: str) -> float:
        return float(statistics.median(getattr(sample, field) for sample in samples))

    return Cost(
        name,
        ranks,
        samples[-1].connections,
        median("server_cpu_us_per_arrival"),
        median("barrier_ms"),
        median("release_p99_ms"),
        median("memory_per_rank_kib"),
    )


def relays_own(reports: Path, nodes: int) -> RelayCost:
    """What the relays wrote down at their end."""
    until(lambda: any(reports.iterdir()), "the relays do not write down what they took")
    time.sleep(1.0)  # The others of the same run are about to.
    figures = [json.loads(path.read_text()) for path in reports.iterdir()]
    for path in list(reports.iterdir()):
        path.unlink()
    return RelayCost(
        nodes,
        statistics.fmean(one["cpu_us_per_arrival"] for one in figures),
        statistics.fmean(one["arrivals_per_message"] for one in figures),
    )


AGENT = """
import os, sys, psutil
import torch
from muster.worker import rendezvous
from muster.worker.store import CoordinatorStore
from muster.worker.node.relay import NodeRelay
store = CoordinatorStore(sys.argv[1], "agent")
store.set("key", "value")
relay = NodeRelay(sys.argv[1]) if sys.argv[2] == "relay" else None
print(relay.endpoint.partition(",")[0] if relay else "none", flush=True)
sys.stdin.readline()
print(psutil.Process().memory_info().rss / 2**20, flush=True)
os._exit(0)
"""
WORKERS = """
import sys, threading
from muster.worker import GrpcBarrier
barriers = [GrpcBarrier(r, 8, "bench", sys.argv[1], 60, 60, run_id="agent", generation=0) for r in range(8)]
def go(barrier):
    for _ in range(100):
        barrier.execute_barrier()
threads = [threading.Thread(target=go, args=(one,)) for one in barriers]
[one.start() for one in threads]
[one.join() for one in threads]
print("done", flush=True)
sys.stdin.readline()
"""


def agent_memory(endpoint: str) -> AgentMemory:
    """An agent with a store, without and with a relay that eight workers speak through."""

    def resident(kind: str) -> float:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        agent = subprocess.Popen([sys.executable, "-c", AGENT, endpoint, kind], **pipes)  # type: ignore[call-overload]
        socket = agent.stdout.readline().strip()
        workers = None
        if kind == "relay":
            workers = subprocess.Popen([sys.executable, "-c", WORKERS, socket], **pipes)  # type: ignore[call-overload]
            assert workers.stdout.readline() == "done\n"
        rest, _ = agent.communicate("\n")
        if workers is not None:
            workers.kill()
            workers.communicate()
        return float(rest)

    return AgentMemory(resident("none"), resident("relay"))


STORE = """
import statistics, sys, time
from muster.worker.store import CoordinatorStore
store, times = CoordinatorStore(sys.argv[1], "store"), []
for number in range(int(sys.argv[2])):
    began = time.perf_counter()
    store.set("key", str(number))
    times.append(time.perf_counter() - began)
print(statistics.median(times) * 1000)
"""


def store_ms(endpoint: str) -> float:
    """The median of an operation of the store, by one client."""
    command = [sys.executable, "-c", STORE, endpoint, str(TIMES)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


ECHO = """
import asyncio, sys
import grpc, uvloop

async def unary(request, context):
    return request

async def stream(_, context):
    while (data := await context.read()) is not grpc.aio.EOF:
        await context.write(data)

async def main():
    server = grpc.aio.server()
    methods = {"Unary": grpc.unary_unary_rpc_method_handler(unary),
               "Stream": grpc.stream_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", methods),))
    server.add_insecure_port("127.0.0.1:" + sys.argv[1])
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""
ASK = """
import queue, statistics, sys, time
import grpc
channel, count = grpc.insecure_channel("127.0.0.1:" + sys.argv[1]), int(sys.argv[2])
unary, said = channel.unary_unary("/echo/Unary"), queue.SimpleQueue()
heard = channel.stream_stream("/echo/Stream")(iter(said.get, None))

def over_stream(data):
    said.put(data)
    return next(heard)

for ask in (unary, over_stream):
    times = []
    for _ in range(count):
        began = time.perf_counter()
        ask(b"x")
        times.append(time.perf_counter() - began)
    print(statistics.median(times) * 1000)
"""


@dataclass(frozen=True, slots=True)
class Floor:
    """What an empty grpc.aio server needs to answer one blocking client, medians in milliseconds."""

    unary_ms: float
    stream_ms: float


def floor() -> Floor:
    """Ask a server that does nothing."""
    port = str(free_port())
    server = subprocess.Popen([sys.executable, "-c", ECHO, port], stdout=subprocess.PIPE)
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == b"ready\n"
        asked = [sys.executable, "-c", ASK, port, str(TIMES)]
        words = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    finally:
        server.kill()
        server.communicate()
    return Floor(*map(float, words))


def crowd(runs: int, ranks: int, seconds: float, processes: int) -> ManyRuns:
    """Runs that have a barrier each second, at moments of their own."""
    port = free_port()
    coordinator = subprocess.Popen(_coordinator(port, 0, Path()), stderr=subprocess.DEVNULL)
    try:
        module = [sys.executable, "-m", "benchmarks.processes.crowd", str(port)]
        shares = [str(runs // processes), str(ranks), str(seconds)]
        loads = [
            subprocess.Popen([*module, str(number), *shares], stdout=subprocess.PIPE, text=True)
            for number in range(processes)
        ]
        waits = [wait for load in loads for _, wait in json.loads(load.communicate()[0].splitlines()[-1])]
    finally:
        coordinator.kill()
        coordinator.wait()
    return ManyRuns(
        runs,
        ranks,
        len(waits),
        statistics.median(waits),
        statistics.quantiles(waits, n=100)[98],
        max(waits),
    )


def page(results: Mapping[str, Any]) -> str:
    """The page of docs/benchmarks."""
    beside = {one["system"]: one for one in results["beside"]}
    tcp, jax = beside["TCPStore"], beside["JAX coordination service"]
    lines, relayed = beside[LINES], beside[RELAYED]
    node = {one["system"]: one for one in results["node"]}
    many, one = results["relays"]
    growth = {row["ranks"]: row for row in results["growth"]}
    large, crowd, agent = growth[16_384], results["crowd"], results["agent"]
    echo = results["floor"]

    def ratios(row: Mapping[str, Any], field: str) -> str:
        return f"{row[field] / tcp[field]:.2f} × TCPStore's, {row[field] / jax[field]:.2f} × JAX's"

    later = node[RELAYED]["barrier_ms"] - node[DIRECT]["barrier_ms"]
    targets = [
        (
            "coordinator's CPU for an arrival, 128 nodes of 8 ranks, as relays speak",
            "0.6 × TCPStore's, 0.15 × JAX's",
            ratios(lines, "cpu_us"),
        ),
        ("the same, with 128 relays and their ranks here, too", "the same", ratios(relayed, "cpu_us")),
        ("a barrier of those, as relays speak", "1 × TCPStore's, 0.3 × JAX's", ratios(lines, "barrier_ms")),
        ("the same, with relays and ranks on this machine", "the same", ratios(relayed, "barrier_ms")),
        (
            "a relay's own CPU for an arrival, to a direct one's at the coordinator: 8 ranks; 1,024",
            "1.2",
            f"{one['cpu_us'] / node[DIRECT]['cpu_us']:.2f}; {many['cpu_us'] / beside[DIRECT]['cpu_us']:.2f}",
        ),
        (
            "an agent's memory with a relay and 8 workers",
            "15 MiB more",
            f"{agent['with_relay'] - agent['without']:.1f} MiB more",
        ),
        ("coordinator's memory for a rank", "8 KiB", f"{relayed['memory_kib']:.1f} KiB"),
        (
            "16,384 ranks on 2,048 streams: coordinator's CPU for a barrier",
            "0.5 s",
            f"{large['cpu_us'] * 16_384 / 1e6:.2f} s",
        ),
        ("the same: last arrival to last release, p99", "1 s", f"{large['release_p99_ms'] / 1000:.2f} s"),
        (
            "CPU for an arrival at 16,384 ranks to that at 1,024",
            "1.2",
            f"{large['cpu_us'] / growth[1024]['cpu_us']:.2f}",
        ),
        ("one node of 8 ranks: a barrier through the relay", "1 ms more", f"{later:.2f} ms more"),
        (
            "an operation of the store, one client, in memory",
            "0.35 ms",
            f"{results['store_ms']:.2f} ms (an empty grpc.aio server: {echo['unary_ms']:.2f} ms; over an "
            "open "
            f"stream {echo['stream_ms']:.2f})",
        ),
        (
            f"{crowd['runs']} runs of {crowd['ranks']} ranks, each with a barrier a second: slowest decision",
            "250 ms",
            f"{crowd['slowest_ms']:.0f} ms (median {crowd['median_ms']:.1f}, p99 {crowd['p99_ms']:.1f})",
        ),
    ]
    machine = results["machine"]
    return f"""# What the relay costs, and saves

Measured on {results["date"]} by `python -m benchmarks.relay`: {machine["processor"]}, {machine["cores"]}
cores, {machine["memory"]}, all on that machine, state in memory. *As relays speak* is the protocol of a
relay spoken by the benchmark, a message for 8 ranks on 128 streams: what the coordinator sees of relays on
machines of their own. With 128 real relays, and the 1,024 ranks behind them, on the coordinator's two cores,
each arrival is also {many["cpu_us"]:.0f} µs of a relay and some 80 of its rank: that is what a barrier's
time is made of there, and arrivals come to the coordinator one by one, so that it wakes for each.

{table(("What", "At most", "Measured"), targets)}
## 1,024 ranks, beside the peers

{table(HEADER, _rows(results["beside"]))}
## One node of 8 ranks

{table(HEADER, _rows(results["node"]))}
The relay handed on {one["arrivals_per_message"]:.1f} arrivals in a message; the 128 above
{many["arrivals_per_message"]:.1f}.

## How it grows, as relays speak

{table(HEADER, _rows(results["growth"]))}
Before, a third of an arrival's time at 16,384 ranks was CPython's collector of cycles, which scanned all
arrivals of the open barrier in each collection (`GARBAGE_THRESHOLD`). The cost of 65,536 ranks was not
profiled; the processes that play them share the two cores.
"""


HEADER = (
    "",
    "ranks",
    "streams",
    "coordinator's CPU for an arrival",
    "one barrier",
    "last arrival to last release, p99",
    "memory for a rank",
)


def _rows(costs: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            cost["system"],
            f"{cost['ranks']:,}",
            f"{cost['connections']:,}",
            f"{cost['cpu_us']:.1f} µs",
            f"{cost['barrier_ms']:.1f} ms",
            f"{cost['release_p99_ms']:.1f} ms",
            f"{cost['memory_kib']:.1f} KiB",
        )
        for cost in costs
    ]


def main() -> int:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one measurement")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each; the median counts")
    parser.add_argument("--largest", type=int, default=GROWTH[-1], help="ranks on the wire, at most")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/relay.json"))
    parser.add_argument("--docs", type=Path, default=Path("docs/benchmarks/relay.md"))
    arguments = parser.parse_args()
    allow_many_files()
    folder = arguments.output.resolve().parent
    results: dict[str, object] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe_machine(folder),
    }
    with tempfile.TemporaryDirectory() as reports:
        os.environ[REPORTS] = reports
        four, one = (Options(arguments.seconds, loads, 1, folder) for loads in (4, 1))
        beside = [cost(name, RANKS, arguments.repeats, four) for name in BESIDE]
        own = [relays_own(Path(reports), RANKS // 8)]
        node = [cost(name, 8, arguments.repeats, one) for name in (DIRECT, RELAYED)]
        own.append(relays_own(Path(reports), 1))
    growth = []
    for ranks in (size for size in GROWTH if size <= arguments.largest):
        try:
            growth.append(cost(LINES, ranks, 1 if ranks > 20_000 else arguments.repeats, four))
        except (MeasurementError, psutil.Error) as error:
            print(f"{ranks} ranks: {error}", file=sys.stderr)
    port = free_port()
    coordinator = subprocess.Popen(_coordinator(port, 0, Path()), stderr=subprocess.DEVNULL)
    try:
        endpoint = f"127.0.0.1:{port}"
        until(lambda: SYSTEMS["muster-memory"].ready(port))
        memory, store = agent_memory(endpoint), store_ms(endpoint)
    finally:
        coordinator.kill()
        coordinator.wait()
    results |= {
        "beside": _dicts(beside),
        "node": _dicts(node),
        "relays": _dicts(own),
        "growth": _dicts(growth),
        "agent": asdict(memory),
        "store_ms": store,
        "floor": asdict(floor()),
        "crowd": asdict(crowd(200, 64, 15.0, 4)),
    }
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    arguments.docs.write_text(page(results))
    print(page(results))
    return 0


def _dicts(some: Iterable[Cost | RelayCost]) -> list[dict[str, object]]:
    return [asdict(one) for one in some]


if __name__ == "__main__":
    sys.exit(main())
