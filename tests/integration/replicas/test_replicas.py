"""Several coordinators, of which one leads: session, store, rendezvous and command find it, and the next."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import muster.worker
from lab.patience import PATIENCE, until
from lab.processes.coordinator import Coordinator
from lab.processes.proxy import Proxy
from muster.client import replicas
from muster.v1 import session_pb2 as pb
from muster.v1 import session_pb2_grpc
from muster.worker import ConnectError, CoordinatorStore, GrpcBarrier
from muster.worker.groups.group import Shape
from muster.worker.node.membership import Place
from muster.worker.session.session import SessionConfig
from muster.worker.session.sessions import session_for
from tests.support.grpc_server import serving
from tests.support.rendezvous_runs import in_thread
from tests.support.replica_clients import CLIENTS, LONG, WITHIN, Succession, a_barrier, node
from tests.support.standby import Address, Standby
from tests.support.waiters import wait_for_arrivals, wait_until_asked

pytestmark = pytest.mark.usefixtures("no_known_addresses")


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    "before", ["dead", "hung", "standby", "two that name each other", "the dead are named"]
)
def test_the_leader_is_found_behind(coordinator: Coordinator, client: Callable[[str], None], before: str):
    with ExitStack() as stack:
        if before == "dead":
            others = [stack.enter_context(Address()).endpoint]
        elif before == "hung":
            others = [stack.enter_context(Address(hung=True)).endpoint]
        elif before == "standby":
            others = [stack.enter_context(Standby()).endpoint]
        elif before == "the dead are named":
            others = [stack.enter_context(Standby(stack.enter_context(Address()).endpoint)).endpoint]
        else:
            one, two = (stack.enter_context(Standby()) for _ in range(2))
            one.follow(two.endpoint)
            two.follow(one.endpoint)
            others = [one.endpoint, two.endpoint]
        client(",".join([*others, coordinator.endpoint]))


@pytest.mark.parametrize("client", CLIENTS)
def test_a_leader_that_was_not_given_is_followed(coordinator: Coordinator, client: Callable[[str], None]):
    with Standby(coordinator.endpoint) as standby:
        client(standby.endpoint)
        # What is known then is used by all that follows: nobody asks the standby twice.
        assert standby.asked[0][1] in ("", None)


def test_a_barrier_waits_through_a_change_of_the_leader(succession: Succession):
    two = [
        GrpcBarrier(rank, 2, "p", succession.endpoint, PATIENCE, PATIENCE, run_id="run", generation=0)
        for rank in range(2)
    ]
    waits = in_thread(two[0].execute_barrier)
    wait_for_arrivals(succession.first.endpoint, 1, "run")
    succession.happens()
    two[1].execute_barrier()
    waits.result(PATIENCE)
    assert ("Connect", succession.first.endpoint) in succession.standby.asked


def test_a_store_waits_through_a_change_of_the_leader(succession: Succession):
    store, other = (CoordinatorStore(succession.endpoint, "run", LONG) for _ in range(2))
    store.set("before", "v")
    waits = in_thread(lambda: store.get("k"))
    wait_until_asked(store)
    succession.happens()
    other.set("k", "v")
    assert waits.result(PATIENCE) == b"v"
    assert other.get("before") == b"v"


def test_a_node_waits_for_its_round_through_a_change_of_the_leader(succession: Succession):
    one, two = (node(succession.endpoint, f"node-{i}", min_nodes=2, max_nodes=2) for i in range(2))
    waits = in_thread(one.join)
    until(lambda: one._stream.connected)
    succession.happens()
    assert {two.join().rank, waits.result(PATIENCE).rank} == {0, 1}
    for each in (one, two):
        each.leave("over")


def test_a_place_is_held_and_given_up_through_a_change_of_the_leader(succession: Succession):
    one = node(succession.endpoint)
    assert one.join() == Place(0, 0, 1)
    succession.happens()
    one.close("over", PATIENCE)
    until(lambda: one._stream.connected)
    one.leave("over")
    assert one.closed


def test_a_goodbye_reaches_the_next_leader(succession: Succession):
    stays, leaves = (
        session_for(
            SessionConfig(endpoint=succession.endpoint, run_id="run", generation=0, rank=rank, host="here")
        )
        for rank in range(2)
    )
    shape = Shape(2)
    for session in (stays, leaves):
        session.join("p", shape, PATIENCE)
    decided = in_thread(lambda: stays.barrier("p", PATIENCE))
    succession.happens()
    leaves.close("done")
    assert decided.result(PATIENCE).outcome is muster.worker.Outcome.MEMBER_LOST


# ---------------------------------------------------------------------- nobody leads


@pytest.mark.parametrize("within", WITHIN)
def test_error_names_each_address_and_its_answer(within: Callable[[str, float], None]):
    with Standby(hold=0.1) as standby, Address() as dead, pytest.raises(ConnectError) as caught:
        within(f"{standby.endpoint},{dead.endpoint}", 3.0)
    said = str(caught.value)
    assert f"{standby.endpoint}: UNAVAILABLE: this replica stands by: nobody leads now." in said
    assert f"{dead.endpoint}: UNAVAILABLE: failed to connect" in said


@pytest.mark.parametrize("within", WITHIN)
def test_clients_report_unreachable_while_no_replica_leads(within: Callable[[str, float], None]):
    """And nothing was refused: callers may try again."""
    with (
        Standby(hold=0.1) as one,
        Standby(hold=0.1) as two,
        pytest.raises(ConnectError, match=f"{one.endpoint}: UNAVAILABLE: this replica stands by") as caught,
    ):
        within(f"{one.endpoint},{two.endpoint}", 3.0)
    assert f"{two.endpoint}: UNAVAILABLE: this replica stands by" in str(caught.value)


@pytest.mark.parametrize("within", WITHIN)
def test_one_hung_replica_does_not_take_a_whole_timeout(
    coordinator: Coordinator, within: Callable[[str, float], None]
):
    with Address(hung=True) as hung:
        began = time.monotonic()
        try:
            within(f"{hung.endpoint},{coordinator.endpoint}", 3_600.0)
        except ConnectError as error:
            raise AssertionError(f"{time.monotonic() - began}") from error
        assert time.monotonic() - began < PATIENCE


# ---------------------------------------------------------------------- a leader that falls silent


@pytest.mark.parametrize("addresses_known", [0, 600])
def test_a_store_leaves_a_leader_that_falls_silent_during_a_call(
    coordinator: Coordinator, tmp_path: Path, addresses_known: int
):
    """No timeout ends the wait: only the keepalive does."""
    (tmp_path / "second").mkdir()
    with (
        Coordinator(tmp_path / "second", state="memory:") as second,
        Proxy(coordinator.port) as proxy,
        Standby(proxy.endpoint) as standby,
    ):
        endpoint = f"{proxy.endpoint},{standby.endpoint}"
        replicas.replicas_of(endpoint).learn([], addresses_known)
        store = CoordinatorStore(endpoint, "run", timedelta(0))
        store.set("first", "v")
        waits = in_thread(lambda: store.get("k"))
        CoordinatorStore(coordinator.endpoint, "run").wait(["first"])
        began = time.monotonic()
        proxy.black_hole()
        standby.holds()
        print(f"noticed after {time.monotonic() - began:.1f} s")
        standby.follow(second.endpoint)
        CoordinatorStore(second.endpoint, "run").set("k", "v")
        assert waits.result(PATIENCE) == b"v"


class Welcoming(session_pb2_grpc.SessionServiceServicer):
    """A leader that tells of its successor, and is gone."""

    def __init__(self, successor: str) -> None:
        self._successor = successor
        self.sessions = 0

    def Connect(self, requests: Any, context: Any) -> Any:  # noqa: N802
        next(requests)
        self.sessions += 1
        welcome = pb.Welcome(
            epoch=1, session_ttl_ms=10_000, ordinals=[1 << 32], replicas=[self._successor], keepalive_ms=900
        )
        yield pb.ConnectResponse(welcome=welcome)
        yield pb.ConnectResponse(drain=pb.Drain(retry_after_ms=3_600_000))


def test_a_welcome_tells_of_the_other_replicas_and_the_keepalive(coordinator: Coordinator):
    """And a drain of one of several is no reason to wait."""
    welcoming = Welcoming(coordinator.endpoint)
    with serving(welcoming, session_pb2_grpc.add_SessionServiceServicer_to_server) as endpoint:
        a_barrier(endpoint)
        known = replicas.replicas_of(endpoint)
        assert known.target("x:1").keepalive_ms == 900
        assert known.known()[0] == coordinator.endpoint
