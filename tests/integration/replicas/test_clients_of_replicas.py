"""Three real replicas on a real etcd: what waits goes on at the next leader."""

import os
import signal
import uuid
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

import muster.worker
from lab.patience import PATIENCE, until
from lab.processes.agents import Job
from lab.processes.etcd import Cluster, cluster
from lab.processes.relay import Relay
from lab.processes.replicas import SAFE_LEASE_TTL, Replica, Replicas, replicas
from muster.client.replicas import replicas_of
from muster.v1 import rendezvous_pb2, rendezvous_pb2_grpc
from muster.worker import CoordinatorStore, GrpcBarrier
from muster.worker.node.membership import NodeConfig, NodeMembership
from tests.support import store_users
from tests.support.members import members
from tests.support.ranks import CONTEXT
from tests.support.rendezvous_runs import in_thread
from tests.support.saves.savers import all_of, savers
from tests.support.waiters import wait_for_arrivals, wait_until_asked


def nodes_at(leader: Replica) -> int:
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
    # A lost process may come back until the test is over.
    patient = f"--session-ttl={PATIENCE}"
    with replicas(
        tmp_path, etcd, prefix=uuid.uuid4().hex, extra=(patient,), lease_ttl=SAFE_LEASE_TTL
    ) as running:
        yield running
        muster.worker.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_waiting_calls_continue_at_the_next_leader(three: Replicas, how: signal.Signals):
    ranks = [
        GrpcBarrier(rank, 3, "p", three.endpoint, PATIENCE, PATIENCE, run_id="job", generation=0)
        for rank in range(3)
    ]
    wait = timedelta(seconds=PATIENCE)
    store, other = (CoordinatorStore(three.endpoint, "job", wait) for _ in range(2))
    assert store.add("n", 1) == 1
    terms: dict[str, Any] = {
        "join_timeout": PATIENCE,
        "connect_timeout": PATIENCE,
        "keep_alive_timeout": PATIENCE,
    }
    nodes = [
        NodeMembership(
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
    until(lambda: nodes[0]._stream.connected)

    leader = three.leader()
    wait_for_arrivals(leader.endpoint, 2)
    wait_until_asked(store)
    leader.coordinator.signal(how)
    ranks[2].execute_barrier()
    for one in at_barrier:
        one.result(PATIENCE)
    assert other.add("n", 1) == 2
    other.set("k", "v")
    assert at_key.result(PATIENCE) == b"v"
    assert {nodes[1].join().rank, at_round.result(PATIENCE).rank} == {0, 1}
    assert sorted(replicas_of(three.endpoint).known()) == sorted(one.endpoint for one in three.members)
    if how is signal.SIGSTOP:
        leader.coordinator.signal(signal.SIGCONT)
    for node in nodes:
        node.close("over", PATIENCE)
        node.leave("over")


def test_rank_behind_a_relay_stays_behind_it_at_the_next_leader(etcd: Cluster, tmp_path: Path):
    # A lease of the default length, for which a relay before a lone coordinator does not wait.
    patient = (f"--session-ttl={PATIENCE}",)
    with (
        replicas(tmp_path, etcd, prefix=uuid.uuid4().hex, extra=patient, lease_ttl=5.0) as three,
        Relay(tmp_path, three.endpoint) as relay,
    ):
        ranks = [
            GrpcBarrier(rank, 2, "p", relay.endpoint, PATIENCE, PATIENCE, run_id="job", generation=0)
            for rank in range(2)
        ]
        at_barrier = in_thread(ranks[0].execute_barrier)
        leader = three.leader()
        wait_for_arrivals(leader.endpoint, 1)
        leader.coordinator.kill()
        ranks[1].execute_barrier()
        at_barrier.result(PATIENCE)
        through = [one.relay for one in members(three.leader().endpoint)]
        assert len(set(through)) == 1, through
        assert through[0], "they speak directly, each on a stream of its own"
        muster.worker.close()


def test_one_address_is_enough_to_begin_with(three: Replicas):
    leader = three.leader()
    standby = three.standbys()[0]
    rank = GrpcBarrier(0, 1, "p", standby.endpoint, PATIENCE, PATIENCE, run_id="job", generation=0)
    rank.execute_barrier()
    standby.coordinator.kill()
    leader.coordinator.kill()
    rank.execute_barrier()
    store = CoordinatorStore(standby.endpoint, "job", timedelta(seconds=PATIENCE))
    store.set("k", "v")


def test_a_job_of_torchrun_survives_its_leaders(three: Replicas, tmp_path: Path):
    (tmp_path / "job").mkdir()
    with Job(tmp_path / "job", three.endpoint) as job:
        agents = [job.agent("2", keep_alive_max_attempt=60, read_timeout=60)]
        leader = three.leader()
        until(lambda: nodes_at(leader) == 1)
        leader.coordinator.kill()
        agents.append(job.agent("2", keep_alive_max_attempt=60, read_timeout=60))
        first = job.round(2)
        leader.coordinator.start()
        three.leader().coordinator.kill()
        os.kill(first[0].pid, signal.SIGKILL)
        job.round(2, after=first[0].round)
        job.finish()
        assert [agent.wait() for agent in agents] == [0, 0], job.said()


def test_a_process_group_meets_through_a_change_of_the_leader(three: Replicas):
    url = f"muster://{three.endpoint}/meet"
    with ProcessPoolExecutor(2, mp_context=CONTEXT) as pool:
        first = pool.submit(store_users.train, 0, 2, three.endpoint, url, 3)
        leader = three.leader()
        wait_for_arrivals(leader.endpoint, 1, "meet")
        leader.coordinator.kill()
        second = pool.submit(store_users.train, 1, 2, three.endpoint, url, 3)
        assert first.result(PATIENCE) == second.result(PATIENCE)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_save_commits_through_a_change_of_the_leader(three: Replicas, tmp_path: Path, how: signal.Signals):
    gate = tmp_path / "gate"
    with savers(three.endpoint, 2, tmp_path / "checkpoints") as world:
        all_of(world, "begin")
        world[0].tell("save", step=1)
        world[1].ask("save", step=1, gate=str(gate))
        world[0].answer()
        for one in world:
            one.tell("finalize")
        leader = three.leader()
        wait_for_arrivals(leader.endpoint, 1, "saves")
        leader.coordinator.signal(how)
        gate.touch()
        assert [one.answer() for one in world] == [[1], [1]]
        all_of(world, "save", step=2)
        assert all_of(world, "finalize") == [[2], [2]]
        assert all_of(world, "load") == [(2, True), (2, True)]
        assert all_of(world, "close") == [[], []]
