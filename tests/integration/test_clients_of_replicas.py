"""Three real replicas on a real etcd: what waits goes on at the next leader."""

import os
import signal
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

import muster.worker
from muster.v1 import rendezvous_pb2, rendezvous_pb2_grpc
from muster.worker import CoordinatorStore, GrpcBarrier, replicas
from muster.worker.attendance import Attendance, NodeConfig
from tests.support.agents import Job
from tests.support.coordinator import Coordinator
from tests.support.etcd import Cluster, cluster
from tests.support.meeting import in_thread
from tests.support.patience import PATIENCE, until


class Replicas:
    """Three of them, that find each other in etcd.

    Args:
        folder: of their logs.
        state: as of ``--state``.
    """

    def __init__(self, folder: Path, state: str) -> None:
        self.all = []
        for name in "abc":
            (folder / name).mkdir()
            # Whoever is lost may come back until the test is over.
            self.all.append(Coordinator(folder / name, state=state, session_ttl=PATIENCE))
        self.endpoint = ",".join(one.endpoint for one in self.all)

    def __enter__(self) -> "Replicas":
        for one in self.all:
            one.start()
        self.leader()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.all:
            one.kill()

    def leader(self) -> Coordinator:
        """Who leads, once somebody does."""
        until(lambda: any(self._leads(one) for one in self.all), "nobody leads")
        return next(one for one in self.all if self._leads(one))

    @staticmethod
    def _leads(one: Coordinator) -> bool:
        try:
            return one.get("/readyz") == (200, "ok\n")
        except OSError:
            return False


def nodes_at(leader: Coordinator) -> int:
    """How many nodes of the job have come."""
    with grpc.insecure_channel(leader.endpoint) as channel:
        stub = rendezvous_pb2_grpc.RendezvousServiceStub(channel)
        try:
            return len(stub.Get(rendezvous_pb2.RendezvousServiceGetRequest(run_id="job")).rendezvous.nodes)
        except grpc.RpcError:
            return 0


@pytest.fixture(scope="module")
def etcd() -> Iterator[Cluster]:
    with cluster() as running:
        yield running


@pytest.fixture
def three(etcd: Cluster, tmp_path: Path) -> Iterator[Replicas]:
    with Replicas(tmp_path, etcd.state(uuid.uuid4().hex)) as running:
        yield running
        muster.worker.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_what_waits_goes_on_at_the_next_leader(three: Replicas, how: signal.Signals):
    ranks = [
        GrpcBarrier(rank, 3, "p", three.endpoint, PATIENCE, PATIENCE, run_id="job", generation=0)
        for rank in range(3)
    ]
    wait = timedelta(seconds=PATIENCE)
    store, other = (CoordinatorStore(three.endpoint, "job", wait) for _ in range(2))
    assert store.add("n", 1) == 1
    terms = {"join_timeout": PATIENCE, "connect_timeout": PATIENCE, "keep_alive_timeout": PATIENCE}
    nodes = [
        Attendance(
            NodeConfig(
                endpoint=three.endpoint,
                run_id="job",
                address=f"node-{number}",
                min_nodes=2,
                max_nodes=2,
                last_call_timeout=1,
                call_timeout=PATIENCE,
                **terms,
            )
        )
        for number in range(2)
    ]
    at_barrier = [in_thread(rank.execute_barrier) for rank in ranks[:2]]
    at_key = in_thread(lambda: store.get("k"))
    at_round = in_thread(nodes[0].join)
    until(lambda: nodes[0]._connected)

    leader = three.leader()
    os.kill(leader.pid, how)
    ranks[2].execute_barrier()
    for one in at_barrier:
        one.result(PATIENCE)
    assert other.add("n", 1) == 2
    other.set("k", "v")
    assert at_key.result(PATIENCE) == b"v"
    assert {nodes[1].join().rank, at_round.result(PATIENCE).rank} == {0, 1}
    assert sorted(replicas.replicas_of(three.endpoint).known()) == sorted(one.endpoint for one in three.all)
    if how is signal.SIGSTOP:
        os.kill(leader.pid, signal.SIGCONT)
    for node in nodes:
        node.close("over", PATIENCE)
        node.leave("over")


def test_one_address_is_enough_to_begin_with(three: Replicas):
    leader = three.leader()
    standby = next(one for one in three.all if one is not leader)
    rank = GrpcBarrier(0, 1, "p", standby.endpoint, PATIENCE, PATIENCE, run_id="job", generation=0)
    rank.execute_barrier()
    standby.kill()
    leader.kill()
    rank.execute_barrier()
    store = CoordinatorStore(standby.endpoint, "job", timedelta(seconds=PATIENCE))
    store.set("k", "v")


def test_a_job_of_torchrun_survives_its_leaders(three: Replicas, tmp_path: Path):
    (tmp_path / "job").mkdir()
    with Job(tmp_path / "job", three.endpoint) as job:
        agents = [job.agent("2", keep_alive_max_attempt=60, read_timeout=60)]
        leader = three.leader()
        until(lambda: nodes_at(leader) == 1)
        leader.kill()
        agents.append(job.agent("2", keep_alive_max_attempt=60, read_timeout=60))
        first = job.round(2)
        leader.start()
        three.leader().kill()
        os.kill(first[0].pid, signal.SIGKILL)
        job.round(2, after=first[0].round)
        job.finish()
        assert [agent.wait() for agent in agents] == [0, 0], job.said()
