"""Measure what the loss of a leader costs: from the fault until the next decision is heard by all ranks.

Three members of etcd, three coordinators, and 512 ranks that wait at a barrier for the last one. Run it from
the root of the repository: `python -m benchmarks.failover`. How long a replica takes to take over is measured
for states of several sizes, beside it.
"""

import json
import logging
import multiprocessing
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.machine import describe_machine
from benchmarks.measuring.measure import cpu_seconds
from benchmarks.processes import lean_ranks
from lab import records
from lab.leaders import successive_leaders
from lab.open_files import allow_many_files
from lab.processes.etcd import Cluster, cluster
from lab.processes.relay import Relay
from lab.processes.replicas import Replica, Replicas, replicas
from muster.service.core.vocabulary.model import MemberState, Shape
from muster.service.core.vocabulary.records import GroupRecord, RankOwnerRecord, RunRecord, StoredRecord
from muster.service.storage import codec
from muster.v1 import barrier_pb2, barrier_pb2_grpc

CONTEXT = multiprocessing.get_context("spawn")
STEP_TIMEOUT = 120.0
RANKS_PER_RUN = 64
DECISIONS_PER_RUN = 16


@dataclass(frozen=True, slots=True)
class Failover:
    """What one kind of fault cost, over all ranks and repeats, in seconds."""

    clients: str
    """Whose sessions the ranks are: of ``CLIENTS``."""
    fault: str
    lease_ttl: float
    repeats: int
    median: float
    p99: float
    longest: float
    cpu: dict[str, float]
    """Seconds of processor time from the fault until the last rank heard, by process; medians."""


@dataclass(frozen=True, slots=True)
class Takeover:
    """How long it takes to take over the state of so many runs, from the lease's end on, in seconds."""

    runs: int
    rows: int
    median: float
    longest: float


# ---------------------------------------------------------------------- the ranks


def play(endpoint: str, ranks: range, world_size: int, pipe: Connection) -> None:
    """Be several ranks: arrive when told to, and tell when each one was released."""
    from muster.worker import GrpcBarrier

    logging.getLogger("muster").setLevel(logging.ERROR)
    allow_many_files()
    barriers: dict[int, GrpcBarrier] = {}

    def join(rank: int) -> None:
        barriers[rank] = GrpcBarrier(
            rank, world_size, "bench", endpoint, STEP_TIMEOUT, STEP_TIMEOUT, run_id="bench", generation=0
        )

    _all(join, ranks)
    pipe.send("joined")
    heard: dict[int, float] = {}

    def execute(rank: int) -> None:
        barriers[rank].execute_barrier()
        heard[rank] = time.monotonic()

    while (ranks_asked := pipe.recv()) is not None:
        heard.clear()
        _all(execute, [rank for rank in ranks if rank in ranks_asked])
        pipe.send(list(heard.values()))


Play = Callable[[str, range, int, Connection], None]
"""Be the ranks of a range, of a world of so many, as the other end of a pipe says."""
RELAYED = "SDK, relayed"
CLIENTS: dict[str, Play] = {"SDK": play, RELAYED: play, "lean": lean_ranks.play}
"""Those that jobs use, directly and behind a relay for each process of them; and those that leave the
processor to the coordinators."""


def _all(do: Callable[[int], None], ranks: "range | list[int]") -> None:
    threads = [threading.Thread(target=do, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class RankProcesses:
    """The ranks, in several processes, each of which has an endpoint."""

    def __init__(
        self, play: Play, endpoints: Sequence[str], ranks: int, world_size: int, stack: ExitStack
    ) -> None:
        self.ranks = ranks
        processes = len(endpoints)
        share = ranks // processes
        self._pipes: list[Connection] = []
        self.processes: list[psutil.Process] = []
        for number, endpoint in enumerate(endpoints):
            ours, theirs = CONTEXT.Pipe()
            some = range(number * share, ranks if number == processes - 1 else (number + 1) * share)
            process = CONTEXT.Process(target=play, args=(endpoint, some, world_size, theirs), daemon=True)
            process.start()
            stack.callback(process.kill)
            self._pipes.append(ours)
            self.processes.append(psutil.Process(process.pid))
        for pipe in self._pipes:
            assert pipe.poll(STEP_TIMEOUT), "the ranks do not join"
            pipe.recv()

    def arrive(self, ranks: range) -> None:
        """These ranks arrive; all are to be told of together."""
        for pipe in self._pipes:
            pipe.send(ranks)

    def released(self) -> list[float]:
        """When each rank heard of the release."""
        times: list[float] = []
        for pipe in self._pipes:
            assert pipe.poll(STEP_TIMEOUT), "the ranks are not released"
            times += pipe.recv()
        return times


def _cpu(process: psutil.Process) -> float:
    """Its processor time; 0 if it has ended."""
    try:
        return cpu_seconds(process)
    except psutil.NoSuchProcess:
        return 0.0


class Usage:
    """The processor time of each process from now on.

    Args:
        crowd: the ranks.
        installation: the coordinators, which all run.
        etcd: the members, which all run.
        relays: of the ranks.
    """

    def __init__(
        self, crowd: RankProcesses, installation: Replicas, etcd: Cluster, relays: Sequence[Relay]
    ) -> None:
        everyone = {
            "ranks": crowd.processes,
            "relays": [psutil.Process(one.pid) for one in relays],
            "coordinators": [psutil.Process(one.coordinator.pid) for one in installation.members],
            "etcd": [psutil.Process(member.pid) for member in etcd.members],
            "the last rank": [psutil.Process()],
        }
        self._began = {who: [(process, _cpu(process)) for process in some] for who, some in everyone.items()}

    def seconds(self) -> dict[str, float]:
        """What each has used. A process that has ended counts for nothing."""
        return {
            who: sum(max(0.0, _cpu(process) - began) for process, began in some)
            for who, some in self._began.items()
        }


class LastRank:
    """The last one, in this process."""

    def __init__(self, endpoint: str, rank: int, world_size: int) -> None:
        from muster.worker import GrpcBarrier

        self._barrier = GrpcBarrier(
            rank, world_size, "bench", endpoint, STEP_TIMEOUT, STEP_TIMEOUT, run_id="bench", generation=0
        )

    def arrive(self) -> float:
        """Arrive; returns when it heard of the release."""
        self._barrier.execute_barrier()
        return time.monotonic()


def kill(leader: Replica) -> None:
    """SIGKILL."""
    leader.coordinator.kill()


def terminate(leader: Replica) -> None:
    """SIGTERM; until it is taken, the leader still decides."""
    before = len(leader.coordinator.log("draining"))
    leader.coordinator.signal(signal.SIGTERM)
    leader.coordinator.logged("draining", before + 1)


def stop(leader: Replica) -> None:
    """SIGSTOP."""
    leader.coordinator.signal(signal.SIGSTOP)


FAULTS = {"SIGKILL": kill, "SIGTERM": terminate, "SIGSTOP": stop}


def failovers(
    etcd: Cluster, clients: str, ranks: int, processes: int, repeats: int, lease_ttl: float
) -> list[Failover]:
    """Every kind of fault, several times each."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-")))
        installation = stack.enter_context(
            replicas(
                folder,
                etcd,
                prefix=f"failover-{clients}",
                lease_ttl=lease_ttl,
                extra=("--session-ttl=60",),
                direct=True,
            )
        )
        endpoints = [installation.endpoint] * processes
        relays: list[Relay] = []
        if clients == RELAYED:
            relays = [stack.enter_context(Relay(folder, installation.endpoint)) for _ in endpoints]
            endpoints = [one.endpoint for one in relays]
        crowd = RankProcesses(CLIENTS[clients], endpoints, ranks - 1, ranks, stack)
        last = LastRank(installation.endpoint, ranks - 1, ranks)

        def begin() -> Usage:
            return Usage(crowd, installation, etcd, relays)

        return [
            _failover(clients, name, fault, installation, begin, crowd, last, repeats, lease_ttl)
            for name, fault in FAULTS.items()
        ]


def _failover(
    clients: str,
    name: str,
    fault: Callable[[Replica], None],
    installation: Replicas,
    begin: Callable[[], Usage],
    crowd: RankProcesses,
    last: LastRank,
    repeats: int,
    lease_ttl: float,
) -> Failover:
    seconds: list[float] = []
    used: list[dict[str, float]] = []
    for _ in range(repeats):
        leader = installation.leader()
        crowd.arrive(range(crowd.ranks))
        _until_waiting(leader, crowd.ranks)
        decided = len(leader.coordinator.log("barrier.decided"))
        usage = begin()
        began = time.monotonic()
        fault(leader)
        own = last.arrive()
        times = [at - began for at in [own, *crowd.released()]]
        used.append(usage.seconds())
        if name == "SIGSTOP":
            leader.coordinator.signal(signal.SIGCONT)
        if name != "SIGKILL":
            leader.coordinator.ended()
        if len(leader.coordinator.log("barrier.decided")) > decided:
            raise SystemExit("the old leader has decided: this was no failover")
        seconds += times
        leader.coordinator.start()
        time.sleep(lease_ttl)
    p99 = statistics.quantiles(seconds, n=100, method="inclusive")[98]
    cpu = {who: statistics.median(one[who] for one in used) for who in used[0]}
    return Failover(clients, name, lease_ttl, repeats, statistics.median(seconds), p99, max(seconds), cpu)


def _until_waiting(leader: Replica, ranks: int) -> None:
    deadline = time.monotonic() + STEP_TIMEOUT
    while time.monotonic() < deadline:
        with grpc.insecure_channel(leader.coordinator.endpoint) as channel:
            stub = barrier_pb2_grpc.BarrierServiceStub(channel)
            shown = stub.List(barrier_pb2.BarrierServiceListRequest(run_id="bench"), timeout=STEP_TIMEOUT)
        if any(one.arrived == ranks and not one.HasField("decision") for one in shown.barriers):
            return
        time.sleep(0.1)
    raise SystemExit("the ranks do not arrive")


# ---------------------------------------------------------------------- taking over


def state_of(runs: int) -> list[StoredRecord]:
    """What so many runs leave behind."""
    kept: list[StoredRecord] = []
    for number in range(runs):
        run_id = f"job-{number:05}"
        kept += [RunRecord(run_id, 0), GroupRecord(run_id, "checkpoint", 0, 0)]
        kept += [records.decision(run_id=run_id, sequence=sequence) for sequence in range(DECISIONS_PER_RUN)]
        for rank in range(RANKS_PER_RUN):
            speaker = RankOwnerRecord(
                run_id=run_id,
                prefix="checkpoint",
                rank=rank,
                incarnation=f"{number:016x}{rank:016x}",
                ordinal=(1 << 32) + rank,
                host=f"node-{rank // 8}",
                pid=4000 + rank,
                start_sequence=0,
                shape=Shape(RANKS_PER_RUN),
                state=MemberState.CONNECTED,
                lineage=(1 << 32) + rank,
            )
            kept.append(speaker)
    return kept


def takeover(etcd: Cluster, runs: int, repeats: int) -> Takeover:
    """Hand the lead over again and again."""
    prefix = f"takeover-{runs}"
    writes = codec.encode_all(state_of(runs)).writes
    with successive_leaders(etcd.state(prefix)) as leaders:
        engine = leaders()
        engine.open()
        engine.commit(writes)
    seconds = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-")))
        two = stack.enter_context(
            replicas(folder, etcd, 2, prefix=prefix, extra=("--session-ttl=600",), direct=True)
        )
        for _ in range(repeats):
            leader = two.leader()
            other = next(one for one in two.members if one is not leader)
            time.sleep(5)  # It is to have the state at hand.
            served = len(other.coordinator.log("serving"))
            leader.coordinator.stop()
            resigned = _when(leader.coordinator.logged("resigned")[-1])
            seconds.append(_when(other.coordinator.logged("serving", served + 1)[-1]) - resigned)
            leader.coordinator.start()
    return Takeover(runs, len(writes), statistics.median(seconds), max(seconds))


def _when(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["timestamp"]).timestamp()


# ---------------------------------------------------------------------- the report


def page(
    found: list[Failover], taken: list[Takeover], ranks: int, processes: int, machine: Mapping[str, str]
) -> str:
    """The page of docs/benchmarks."""
    lines = [
        "# Failover",
        "",
        f"Measured on {datetime.now(UTC).date().isoformat()} by `python -m benchmarks.failover`: "
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory']}. etcd, coordinators "
        "and ranks share that machine; etcd keeps its data in memory.",
        "",
        f"{ranks} ranks wait at a barrier; the leader is lost, and the last rank arrives. The time is that "
        "from the fault until a rank heard of the release, over all ranks and repeats. The lease's TTL is "
        f"{found[0].lease_ttl:g} s.",
        "",
        "| Ranks | The leader gets | repeats | median | p99 | longest | aimed at, p99 | "
        + " | ".join(f"CPU of {who}" for who in found[0].cpu)
        + " |",
        "|-|-|-|-|-|-|-|" + "-|" * len(found[0].cpu),
    ]
    for one in found:
        wanted = 1.0 if one.fault == "SIGTERM" else one.lease_ttl + 1
        lines.append(
            f"| {one.clients} | {one.fault} | {one.repeats} | "
            f"{one.median:.2f} s | {one.p99:.2f} s | {one.longest:.2f} s | "
            f"{wanted:g} s | " + " | ".join(f"{seconds:.1f} s" for seconds in one.cpu.values()) + " |"
        )
    lines += [
        "",
        f"*SDK*: the ranks are sessions of the SDK, threads of {processes} processes that all reconnect at "
        f"once, on the {machine['cores']} cores that they share with everything else. What that costs them "
        "in processor time is time here; in a job, each node's ranks have cores of their own. *relayed*: the "
        "same behind a relay for each of these processes. *lean*: "
        "clients of the same protocol that cost little, so that what is seen is the coordinators.",
        "",
        "## Taking over",
        "",
        f"From the end of the lease until the next leader answers, by the size of the state: runs of "
        f"{RANKS_PER_RUN} ranks, with {DECISIONS_PER_RUN} decisions each.",
        "",
        "| runs | rows | median | longest |",
        "|-|-|-|-|",
        *(f"| {one.runs:,} | {one.rows:,} | {one.median:.2f} s | {one.longest:.2f} s |" for one in taken),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--processes", type=int, default=4, help="that play the ranks")
    parser.add_argument("--clients", nargs="+", choices=list(CLIENTS), default=list(CLIENTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lease-ttl", type=float, default=5.0, metavar="SECONDS")
    parser.add_argument("--runs", type=int, nargs="*", default=[10, 100, 1000], metavar="N")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/failover.json"))
    parser.add_argument("--docs", type=Path, default=Path("docs/benchmarks"))
    given = parser.parse_args()
    machine = describe_machine(given.output.resolve().parent)
    with cluster(3) as etcd:
        taken = [takeover(etcd, runs, given.repeats) for runs in given.runs]
        for one in taken:
            print(one, flush=True)
        found: list[Failover] = []
        for clients in given.clients:
            found += failovers(etcd, clients, given.ranks, given.processes, given.repeats, given.lease_ttl)
        for each in found:
            print(each, flush=True)
    results = {
        "machine": machine,
        "failover": [asdict(one) for one in found],
        "takeover": [asdict(one) for one in taken],
    }
    given.output.write_text(json.dumps(results, indent=2) + "\n")
    (given.docs / "failover.md").write_text(page(found, taken, given.ranks, given.processes, machine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
