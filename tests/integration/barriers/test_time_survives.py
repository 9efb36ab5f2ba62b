"""A coordinator that is killed more often than a timeout lets nobody wait on and on."""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from lab.patience import PATIENCE, until
from lab.processes.coordinator import Coordinator
from lab.processes.etcd import cluster
from lab.processes.replicas import SAFE_LEASE_TTL
from muster.v1 import rendezvous_pb2, rendezvous_pb2_grpc
from muster.worker import ConnectError, CoordinatorStore, StoreTimeoutError
from muster.worker.errors import RefusedError
from muster.worker.node.membership import NodeConfig, NodeMembership
from tests.support.ranks import everyone, ranks
from tests.support.rendezvous_runs import in_thread
from tests.support.waiters import arrived, wait_for_arrivals

TIMEOUT = 16
LIFE = 8.0
"""Seconds from when all who wait are back to the next kill: less than the timeout."""
MAX_LIVES = 8
HOURS = 5 * 3600.0

pytestmark = [pytest.mark.also_through_relay, pytest.mark.back_in_time]


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Coordinator]:
    """One that gives no rank up meanwhile."""
    with Coordinator(tmp_path, session_ttl=60) as coordinator:
        yield coordinator


@pytest.fixture
def node(patient: Coordinator) -> Iterator[NodeMembership]:
    config = NodeConfig(
        endpoint=patient.endpoint,
        run_id="alone",
        address="node-0",
        min_nodes=2,
        max_nodes=2,
        join_timeout=TIMEOUT,
        last_call_timeout=1,
        keep_alive_timeout=60,
        connect_timeout=PATIENCE,
        call_timeout=1,
    )
    node = NodeMembership(config)
    yield node
    node.leave("the test is over")


def is_back(coordinator: Coordinator, who: str) -> bool:
    """Whether the coordinator knows of one who waits; a store asks again until its own time is over."""
    if who == "rank":
        return arrived(coordinator.endpoint) == 1
    if who == "node":
        with grpc.insecure_channel(coordinator.endpoint) as channel, suppress(grpc.RpcError):
            shown = rendezvous_pb2.RendezvousServiceGetRequest(run_id="alone")
            rendezvous = rendezvous_pb2_grpc.RendezvousServiceStub(channel)
            return any(one.connected for one in rendezvous.Get(shown, timeout=PATIENCE).rendezvous.nodes)
    return who == "store"


def test_barriers_joins_and_waits_for_keys_time_out(patient: Coordinator, node: NodeMembership):
    store = CoordinatorStore(patient.endpoint, "alone")
    with ranks(patient.endpoint, 2) as (zero, one):
        everyone([zero, one])
        zero.tell("barrier", timeout=float(TIMEOUT))
        join: Future[object] = in_thread(node.join)
        wait: Future[None] = in_thread(lambda: store.wait(["never"], timedelta(seconds=TIMEOUT)))

        def waiting() -> list[str]:
            ended = {"rank": zero.has_answered(), "node": join.done(), "store": wait.done()}
            return [who for who, has_ended in ended.items() if not has_ended]

        for _ in range(MAX_LIVES):
            until(lambda: all(is_back(patient, who) for who in waiting()), "they do not come back")
            # An idle wait is wanted here: that is how long the coordinator lives.
            time.sleep(LIFE)
            if not waiting():
                break
            patient.kill()
            patient.start()
        else:
            pytest.fail(f"they wait on and on: {waiting()}")
        heard = zero.answer()
        assert (heard.outcome, heard.missing_ranks) == ("TIMED_OUT", [1])
        assert f"timed out after {TIMEOUT} s" in heard.message
        assert one.ask("barrier").outcome == "TIMED_OUT"
    refused = join.exception(0)
    assert isinstance(refused, RefusedError)
    assert refused.reason == "RENDEZVOUS_TIMED_OUT"
    # The store asks again until its own time is over, and its end may find no coordinator.
    assert isinstance(wait.exception(0), StoreTimeoutError | ConnectError)


def test_replicas_with_clocks_hours_apart_take_over_from_each_other(tmp_path: Path):
    with cluster() as etcd:
        both = []
        for name, ahead in (("behind", -HOURS), ("ahead", HOURS)):
            (tmp_path / name).mkdir()
            program = (sys.executable, "-m", "tests.support.chaos.wrong_clock", str(ahead))
            replica = Coordinator(
                tmp_path / name,
                state=etcd.state("muster"),
                session_ttl=PATIENCE,
                extra=(f"--lease-ttl={SAFE_LEASE_TTL}",),
                program=program,
            )
            both.append(replica)
        behind, ahead_of = both
        with behind:
            behind.logged("serving")
            with ahead_of, ranks(f"{behind.endpoint},{ahead_of.endpoint}", 2) as (zero, one):
                for leader, other in ((behind, ahead_of), (ahead_of, behind)):
                    assert {heard.outcome for heard in everyone([zero, one])} == {"RELEASED"}
                    zero.tell("barrier")
                    wait_for_arrivals(leader.endpoint, 1)
                    served = len(other.log("serving"))
                    leader.kill()
                    assert one.ask("barrier").outcome == zero.answer().outcome == "RELEASED"
                    other.logged("serving", served + 1)
                    leader.start()
                heard = zero.ask("barrier", timeout=1.0)
                assert (heard.outcome, heard.missing_ranks) == ("TIMED_OUT", [1])
