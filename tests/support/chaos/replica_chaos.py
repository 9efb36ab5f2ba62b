"""Traffic on several coordinators and an etcd of several members, both of which fail.

Every process is real: three members of etcd, three coordinators, the ranks of several runs, the clients of a
store, the nodes of a rendezvous. Between all of them are proxies. For a long run:

    python -m tests.support.chaos.replica_chaos --faults 200
"""

import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import grpc

from lab.patience import PATIENCE, until
from lab.processes.etcd import cluster, compact
from lab.processes.replicas import LEASE_TTL, MUSTER_PROGRAM, Replica, Replicas, replicas
from muster.v1 import run_pb2, run_pb2_grpc, store_pb2, store_pb2_grpc
from tests.support.chaos.harness import DrawnFaults, command, option
from tests.support.chaos.traffic import Traffic
from tests.support.ranks import Identity, Rank

RUNS = ("alpha", "beta", "gamma")
RANKS = 3
CLIENTS = 3
NODES = 3
TIMEOUT = 60.0
"""Seconds of each barrier."""


@dataclass(kw_only=True)
class ReplicaChaos(DrawnFaults):
    """Inject faults into coordinators and their etcd; each is over, and one leads, before the next."""

    BROKEN = "broken_replica"
    PROGRAM = MUSTER_PROGRAM

    quorum_loss: float = option(20.0, "seconds without a majority of etcd")

    def open(self, folder: Path, stack: ExitStack) -> None:
        """Start etcd, the coordinators and all who work with them, and wait for the first traffic."""
        self._etcd = stack.enter_context(cluster(3))
        extra = (f"--session-ttl={PATIENCE}",)
        self._replicas = stack.enter_context(replicas(folder, self._etcd, extra=extra, program=self.program))
        self.traffic = Traffic(self, folder, stack, TIMEOUT)
        self._ranks = [rank for run in RUNS for rank in self._start("mixed", run, RANKS)]
        self._clients = self._start("change_store", "store", CLIENTS)
        self._nodes = self._start("meet", "nodes", NODES)
        until(lambda: _all_at_work(self._replicas), "there is no traffic")

    def _start(self, operation: str, run: str, size: int) -> list[Rank]:
        endpoint = self._replicas.endpoint
        return [
            self.traffic.start(operation, Identity(endpoint, rank, size, run_id=run)) for rank in range(size)
        ]

    def recover(self) -> None:
        """Start all coordinators that do not run, and wait for one to lead."""
        self._replicas.start()
        self._leader()

    def facts(self) -> list[str]:
        """Return how slow the barriers were."""
        return [f"the slowest: {self.traffic.slowest()}"]

    # ------------------------------------------------------------------ the judge

    def judge(self) -> None:
        """Let all end, and judge the barriers, the store and the rounds."""
        self.traffic.end()
        failover = self.quorum_loss + 10 * LEASE_TTL
        self.traffic.judge_barriers(self._ranks, slowest=TIMEOUT + failover)
        answers = {client.rank: answer for client, answer in self.traffic.answers(self._clients)}
        # If one has failed, nobody knows what was acknowledged.
        if len(answers) == CLIENTS and None not in answers.values():
            self._judge_store(answers)
        places = {node.rank: answer or [] for node, answer in self.traffic.answers(self._nodes)}
        self.counts["rounds"] = len({round for those in places.values() for round, _, _ in those})
        self.wrong += wrong_rounds(places)
        members = self._replicas.members
        self.counts["leaders in turn"] = sum(len(one.coordinator.log("serving")) for one in members)

    def _judge_store(self, answers: dict[int, tuple[list[int], int]]) -> None:
        from muster.worker import CoordinatorStore

        store = CoordinatorStore(self._replicas.endpoint, "store", timedelta(seconds=PATIENCE))
        logs = {rank: store.get(f"log {rank}").decode() for rank, (_, count) in answers.items() if count}
        store.close()
        self.counts["changes of the store"] = 2 * sum(len(sums) for sums, _ in answers.values())
        self.wrong += wrong_changes(answers, logs)

    # ------------------------------------------------------------------ faults

    def kinds(self) -> tuple[Callable[[], None], ...]:
        """Return the faults."""
        return (
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

    def _leader(self, *others: Replica) -> Replica:
        return self._replicas.leader(*others, revived=True)

    def leader_killed(self) -> None:
        """SIGKILL."""
        self._leader().coordinator.kill()

    def leader_stopped_and_woken(self) -> None:
        """SIGSTOP for longer than its lease; it wakes as a deposed leader."""
        leader = self._leader()
        leader.coordinator.signal(signal.SIGSTOP)
        self.idle(LEASE_TTL + 0.5, 2 * LEASE_TTL)
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
        self.idle(0.3, 0.6)
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
            answer = store_pb2_grpc.StoreServiceStub(old).Get(look, timeout=2 * LEASE_TTL)
            if list(answer.values) != [value]:
                self.wrong.append(f"a deposed leader told {answer.values} of a key that was changed since")

    def leader_cut_from_workers(self) -> None:
        """It still renews its lease."""
        leader = self._leader()
        leader.cut_from_workers()
        self.idle(0.5, LEASE_TTL)
        leader.heal()

    def slow_etcd(self) -> None:
        """Each answer comes late, by up to the time of a lease."""
        leader = self._leader()
        leader.slow_etcd(self.chance.uniform(0.0, LEASE_TTL))
        self.idle(LEASE_TTL, 2 * LEASE_TTL)
        leader.heal()

    def commit_comes_late(self) -> None:
        """What a leader commits reaches etcd when the next leader has committed, too; and then comes a third.

        The third begins with what etcd has, and nobody writes between the late commit and its look.
        """
        first = self._leader()
        first.say_late()
        second = self._leader(first)
        self.idle(0.5, LEASE_TTL)
        second.coordinator.kill()
        first.heard_late()
        first.coordinator.kill()
        self.idle(0.1, 0.5)
        first.heal()

    def member_killed(self) -> None:
        """One that may or may not lead, and comes back."""
        member = self.chance.choice(self._etcd.members)
        member.kill()
        self.idle(0.2, LEASE_TTL)
        member.start()
        self._etcd.wait()

    def etcds_leader_killed(self) -> None:
        """The members elect another one."""
        member = self._etcd.leader()
        member.kill()
        self.idle(0.5, LEASE_TTL)
        member.start()
        self._etcd.wait()

    def majority_lost(self) -> None:
        """Nobody can lead."""
        members = self.chance.sample(self._etcd.members, 2)
        for member in members:
            member.kill()
        time.sleep(self.quorum_loss)
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
        self.idle(0.2, 1.0)
        compact(self._etcd)
        standby.heal()


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


def wrong_changes(answers: dict[int, tuple[list[int], int]], logs: dict[int, str]) -> list[str]:
    """Return what is wrong with a store: every acknowledged change must be there, once.

    Args:
        answers: the sums that each client was told, and how many of its appends were acknowledged.
        logs: what is in the store, by client that appended.
    """
    wrong = []
    sums = sorted(one for sums, _ in answers.values() for one in sums)
    if sums != list(range(1, len(sums) + 1)):
        wrong.append(f"{len(sums)} additions were acknowledged, and their sums are not 1 to that")
    for client, (_, appended) in answers.items():
        wanted = "".join(f"{number};" for number in range(1, appended + 1))
        if appended and logs[client] != wanted:
            wrong.append(f"client {client} appended {appended} times, and that is not what is there")
    return wrong


def wrong_rounds(places: dict[int, list[tuple[int, int, int]]]) -> list[str]:
    """Return what is wrong with rounds: they rise, and each rank of a round is given once.

    Args:
        places: by node, the round, rank and world size of each place that it got.
    """
    wrong = []
    given: dict[tuple[int, int], int] = {}
    for number, own in places.items():
        rounds = [round for round, _, _ in own]
        if rounds != sorted(set(rounds)):
            wrong.append(f"node {number} was in the rounds {rounds}")
        for round, rank, size in own:
            if size != NODES or not 0 <= rank < size:
                wrong.append(f"round {round} gave node {number} rank {rank} of {size}")
            other = given.setdefault((round, rank), number)
            if other != number:
                wrong.append(f"round {round} gave rank {rank} to the nodes {other} and {number}")
    return wrong


if __name__ == "__main__":
    sys.exit(command(ReplicaChaos))
