"""Traffic on several coordinators and an etcd of several members, with faults drawn by a seed, and a judge.

Every process is real: three members of etcd, three coordinators, the ranks of several runs, the clients of a
store, the nodes of a rendezvous. Between all of them are proxies. For a long run:

    python -m tests.support.chaos.robustness --faults 200
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from lab.patience import PATIENCE, until
from lab.processes.etcd import Cluster, cluster, compact
from lab.processes.fork_client import spawning
from lab.processes.replicas import LEASE_TTL, MUSTER_PROGRAM, Replica, Replicas, replicas
from muster.v1 import run_pb2, run_pb2_grpc, store_pb2, store_pb2_grpc
from tests.support.ranks import Identity, Rank, RankFailed
from tests.support.world import history

RUNS = ("alpha", "beta", "gamma")
RANKS = 3
CLIENTS = 3
NODES = 3
TIMEOUT = 60.0
"""Seconds of each barrier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to happen."""

    seed: int
    faults: int
    quorum_loss: float = 20.0
    """Seconds without a majority of etcd."""
    only: tuple[str, ...] = ()
    """The kinds of fault; empty: all."""
    program: tuple[str, ...] = MUSTER_PROGRAM
    """The coordinators'."""
    pause: float = 0.0
    """Seconds that everyone waits between what they do; 0: as much traffic as the machine bears."""


@dataclass(slots=True)
class Account:
    """What did happen."""

    plan: Plan
    faults: Counter[str] = field(default_factory=Counter)
    barriers: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    longest: dict[str, float] = field(default_factory=dict)
    """Seconds of the slowest barrier, by the fault during which it began."""
    rounds: int = 0
    changes: int = 0
    epochs: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        faults = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        outcomes = ", ".join(f"{name} {count}" for name, count in sorted(self.outcomes.items()))
        slowest = ", ".join(f"{seconds:.1f} s ({name})" for name, seconds in self.longest.items())
        lines = [
            f"seed {self.plan.seed}, {self.seconds:.0f} s, {self.faults.total()} faults: {faults}",
            f"{self.epochs} leaders in turn",
            f"{self.barriers} barriers ({outcomes}), the slowest: {slowest}",
            f"{self.rounds} rounds of {NODES} nodes, {self.changes} acknowledged changes of the store",
            *(f"WRONG: {one}" for one in self.wrong),
        ]
        return "\n".join(lines)


class Faults:
    """What may go wrong, each by a method; all is well again when it returns.

    Args:
        etcd: the members.
        installation: the coordinators.
        plan: what is to happen.
    """

    def __init__(self, etcd: Cluster, installation: Replicas, plan: Plan) -> None:
        self._etcd = etcd
        self._replicas = installation
        self._chance = random.Random(plan.seed)
        self._plan = plan
        self.kinds: tuple[Callable[[], None], ...] = (
            self.leader_killed,
            self.leader_stopped_and_woken,
            self.leader_cut_from_etcd,
            self.idle_leader_cut_from_etcd,
            self.leader_cut_from_workers,
            self.slow_etcd,
            self.commit_comes_late,
            self.member_killed,
            self.etcds_leader_killed,
            self.majority_lost,
            self.all_killed,
            self.rolling_restart,
            self.compaction,
        )

        if plan.only:
            self.kinds = tuple(kind for kind in self.kinds if kind.__name__ in plan.only)
        self.wrong: list[str] = []
        """What was seen on the way that must not be."""

    def draw(self, number: int) -> str:
        """Let one happen; each kind comes once before any comes again.

        Returns:
            Its name.
        """
        if number % len(self.kinds) == 0:
            self._order = self._chance.sample(self.kinds, len(self.kinds))
        kind = self._order[number % len(self.kinds)]
        kind()
        self._mend()
        return kind.__name__

    def _mend(self) -> None:
        self._replicas.start()
        self._leader()

    def _leader(self, *others: Replica) -> Replica:
        return self._replicas.leader(*others, revived=True)

    def leader_killed(self) -> None:
        """SIGKILL."""
        self._leader().coordinator.kill()

    def leader_stopped_and_woken(self) -> None:
        """SIGSTOP for longer than its lease; it wakes as a deposed leader."""
        leader = self._leader()
        leader.coordinator.signal(signal.SIGSTOP)
        self._pause(LEASE_TTL + 0.5, 2 * LEASE_TTL)
        leader.coordinator.signal(signal.SIGCONT)
        leader.coordinator.ended()

    def leader_cut_from_etcd(self) -> None:
        """It still reaches its workers, whose arrivals wait for a commit that hangs."""
        leader = self._leader()
        leader.cut_from_etcd()
        self._look_at(leader)
        leader.coordinator.ended()
        leader.heal()

    def idle_leader_cut_from_etcd(self) -> None:
        """No commit hangs, and it could tell what it knows; it must not once another one leads."""
        leader = self._leader()
        leader.cut_from_workers()
        self._pause(0.3, 0.6)
        leader.cut_from_etcd()
        self._look_at(leader)
        leader.coordinator.kill()
        leader.heal()

    def _look_at(self, deposed: Replica) -> None:
        """Change a key at the next leader, and read it at the last one."""
        value = str(time.monotonic_ns()).encode()
        request = store_pb2.SetRequest(
            run_id="probe",
            entries=[store_pb2.KeyValue(key="key", value=value)],
            operation=store_pb2.OperationId(client=value.decode(), number=1),
        )
        until(lambda: _set(self._leader(deposed), request), "the key cannot be changed")
        with grpc.insecure_channel(deposed.coordinator.endpoint) as old, suppress(grpc.RpcError):
            look = store_pb2.StoreServiceGetRequest(run_id="probe", keys=["key"], timeout_ms=1)
            told = store_pb2_grpc.StoreServiceStub(old).Get(look, timeout=2 * LEASE_TTL)
            if list(told.values) != [value]:
                self.wrong.append(f"a deposed leader told {told.values} of a key that was changed since")

    def leader_cut_from_workers(self) -> None:
        """It still renews its lease."""
        leader = self._leader()
        leader.cut_from_workers()
        self._pause(0.5, LEASE_TTL)
        leader.heal()

    def slow_etcd(self) -> None:
        """Each answer comes late, by up to the time of a lease."""
        leader = self._leader()
        leader.slow_etcd(self._chance.uniform(0.0, LEASE_TTL))
        self._pause(LEASE_TTL, 2 * LEASE_TTL)
        leader.heal()

    def commit_comes_late(self) -> None:
        """What a leader commits reaches etcd when the next leader has committed, too; and then comes a third.

        The third begins with what etcd has, and nobody writes between the late commit and its look.
        """
        first = self._leader()
        first.say_late()
        second = self._leader(first)
        self._pause(0.5, LEASE_TTL)
        second.coordinator.kill()
        first.heard_late()
        first.coordinator.kill()
        self._pause(0.1, 0.5)
        first.heal()

    def member_killed(self) -> None:
        """One that may or may not lead, and comes back."""
        member = self._chance.choice(self._etcd.members)
        member.kill()
        self._pause(0.2, LEASE_TTL)
        member.start()
        self._etcd.wait()

    def etcds_leader_killed(self) -> None:
        """The members elect another one."""
        member = self._etcd.leader()
        member.kill()
        self._pause(0.5, LEASE_TTL)
        member.start()
        self._etcd.wait()

    def majority_lost(self) -> None:
        """Nobody can lead."""
        members = self._chance.sample(self._etcd.members, 2)
        for member in members:
            member.kill()
        time.sleep(self._plan.quorum_loss)
        for member in members:
            member.start()
        self._etcd.wait()

    def all_killed(self) -> None:
        """All coordinators at once."""
        for replica in self._replicas.members:
            replica.coordinator.kill()

    def rolling_restart(self) -> None:
        """Each is told to stop and started again, one after the other."""
        for replica in self._replicas.members:
            if replica.coordinator.runs:
                replica.coordinator.stop()
            replica.coordinator.start()
            self._leader()

    def compaction(self) -> None:
        """The past of all keys is gone, while one replica does not look."""
        leader = self._leader()
        standby = next(one for one in self._replicas.members if one is not leader)
        standby.cut_from_etcd()
        self._pause(0.2, 1.0)
        compact(self._etcd)
        standby.heal()

    def _pause(self, least: float, most: float) -> None:
        # An idle wait is wanted here: the fault lasts for so long.
        time.sleep(self._chance.uniform(least, most))


def run(plan: Plan, folder: Path) -> Account:
    """Let it happen, and judge it.

    Args:
        plan: what is to happen.
        folder: an empty one, where all traces are left.
    """
    account = Account(plan)
    began = time.monotonic()
    end = folder / "end"
    with ExitStack() as stack:
        etcd = stack.enter_context(cluster(3))
        installation = stack.enter_context(
            replicas(folder, etcd, extra=(f"--session-ttl={PATIENCE}",), program=plan.program)
        )
        everyone = {
            "mixed": [
                _process(stack, installation, run, rank, RANKS) for run in RUNS for rank in range(RANKS)
            ],
            "change_store": [
                _process(stack, installation, "store", rank, CLIENTS) for rank in range(CLIENTS)
            ],
            "meet": [_process(stack, installation, "nodes", rank, NODES) for rank in range(NODES)],
        }
        for operation, processes in everyone.items():
            for process in processes:
                process.tell(operation, until=str(end), pause=plan.pause)
        until(lambda: _all_at_work(installation), "there is no traffic")
        faults = Faults(etcd, installation, plan)
        when: list[tuple[float, str]] = []
        for number in range(plan.faults):
            started = time.monotonic()
            name = faults.draw(number)
            when.append((started, name))
            account.faults[name] += 1
            # They are to get on in between.
            time.sleep(0.5)
        end.touch()
        account.wrong += faults.wrong
        _judge_barriers(account, everyone["mixed"], when)
        _judge_store(account, everyone["change_store"], installation)
        _judge_rounds(account, everyone["meet"])
        account.epochs = sum(len(one.coordinator.log("serving")) for one in installation.members)
    account.seconds = time.monotonic() - began
    return account


def _set(leader: Replica, request: store_pb2.SetRequest) -> bool:
    """Whether a key was changed; it may be asked again."""
    with grpc.insecure_channel(leader.coordinator.endpoint) as channel, suppress(grpc.RpcError):
        store_pb2_grpc.StoreServiceStub(channel).Set(request, timeout=LEASE_TTL)
        return True
    return False


def _all_at_work(installation: Replicas) -> bool:
    """Whether every run has had a barrier and a round, and there is a store."""
    leader = installation.leader(revived=True).coordinator
    deciding = {line["run"] for line in leader.log("barrier.decided")}
    if deciding < set(RUNS) or not leader.log("round.completed"):
        return False
    with grpc.insecure_channel(leader.endpoint) as channel, suppress(grpc.RpcError):
        shown = run_pb2_grpc.RunServiceStub(channel).List(run_pb2.RunServiceListRequest(), timeout=PATIENCE)
        return any(run.store_keys for run in shown.runs)
    return False


def _process(stack: ExitStack, installation: Replicas, run_id: str, rank: int, size: int) -> Rank:
    process = Rank(Identity(installation.endpoint, rank, size, run_id=run_id))
    stack.callback(process.end)
    return process


def _answer(account: Account, process: Rank) -> Any:
    """What it has to tell; None, and something is wrong, if it failed."""
    try:
        return process.answer(timeout=2 * PATIENCE)
    except RankFailed as failure:
        account.wrong.append(str(failure))
        return None


def _judge_barriers(account: Account, processes: list[Rank], when: list[tuple[float, str]]) -> None:
    """One decision, none released without all, nobody out of step, none hung: by what ranks wrote down."""
    failover = account.plan.quorum_loss + 10 * LEASE_TTL
    for process in processes:
        took = _answer(account, process) or []
        for began, seconds in took:
            during = next((name for started, name in reversed(when) if started < began + seconds), "none")
            account.longest[during] = max(account.longest.get(during, 0.0), seconds)
        if process.identity.rank == 0:
            account.barriers += len(took)
    longest = max(account.longest.values(), default=0.0)
    if longest > TIMEOUT + failover:
        account.wrong.append(f"a barrier took {longest:.1f} s")
    events = [event for process in processes for event in process.ask("history")]
    told = [event for _, event in sorted(events, key=lambda pair: pair[0])]
    account.wrong += history.violations(told)
    account.outcomes.update(
        event.outcome for event in told if isinstance(event, history.Heard) and event.life.rank == 0
    )


def _judge_store(account: Account, clients: list[Rank], installation: Replicas) -> None:
    """Every acknowledged change is there, once."""
    from datetime import timedelta

    from muster.worker import CoordinatorStore

    answers = [_answer(account, client) for client in clients]
    if None in answers:
        return  # Nobody knows what was acknowledged.
    sums = sorted(one for sums, _ in answers for one in sums)
    account.changes = 2 * len(sums)
    if sums != list(range(1, len(sums) + 1)):
        account.wrong.append(f"{len(sums)} additions were acknowledged, and their sums are not 1 to that")
    store = CoordinatorStore(installation.endpoint, "store", timedelta(seconds=PATIENCE))
    for rank, (_, appended) in enumerate(answers):
        wanted = "".join(f"{number};" for number in range(1, appended + 1))
        if appended and store.get(f"log {rank}").decode() != wanted:
            account.wrong.append(f"client {rank} appended {appended} times, and that is not what is there")
    store.close()


def _judge_rounds(account: Account, nodes: list[Rank]) -> None:
    """Each rank of a round is given once, and rounds rise."""
    given: dict[tuple[int, int], int] = {}
    for number, node in enumerate(nodes):
        places = _answer(account, node) or []
        rounds = [round for round, _, _ in places]
        if rounds != sorted(set(rounds)):
            account.wrong.append(f"node {number} was in the rounds {rounds}")
        for round, rank, size in places:
            if size != NODES or not 0 <= rank < size:
                account.wrong.append(f"round {round} gave node {number} rank {rank} of {size}")
            other = given.setdefault((round, rank), number)
            if other != number:
                account.wrong.append(f"round {round} gave rank {rank} to the nodes {other} and {number}")
    account.rounds = len({round for round, _ in given})


def main() -> int:
    parser = argparse.ArgumentParser(description="Replicas under faults of every kind.")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--quorum-loss", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--only", nargs="*", default=(), metavar="FAULT", help="the kinds of fault")
    parser.add_argument(
        "--broken", metavar="KIND", help="with a fault of tests.support.chaos.broken_replica built in"
    )
    given = parser.parse_args()
    broken = (sys.executable, "-m", "tests.support.chaos.broken_replica", given.broken)
    plan = Plan(
        seed=given.seed,
        faults=given.faults,
        quorum_loss=given.quorum_loss,
        only=tuple(given.only),
        program=broken if given.broken else MUSTER_PROGRAM,
    )
    print(plan, flush=True)
    with tempfile.TemporaryDirectory(prefix="muster-robustness-") as folder, spawning():
        account = run(plan, Path(folder))
    print(account)
    return 1 if account.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
