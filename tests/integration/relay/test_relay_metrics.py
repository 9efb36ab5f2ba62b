"""Whether a relay's metrics tell one that is cut off from one that nobody needs."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from lab.patience import PATIENCE
from lab.processes.coordinator import Coordinator, free_port
from lab.processes.relay import Relay
from muster.client.calls import reason_of
from muster.v1 import session_pb2, session_pb2_grpc, store_pb2, store_pb2_grpc


@pytest.fixture
def cut_off(tmp_path: Path) -> Iterator[Relay]:
    with Relay(tmp_path, f"127.0.0.1:{free_port()}") as relay:
        yield relay


def reached(relay: Relay) -> tuple[float, float]:
    """Whether it says that it reaches the coordinator, and how often it did not for someone who asked."""
    connected = relay.metric("muster_relay_upstream_connected")
    return connected, relay.metric("muster_relay_cut_off_total")


def refused(relay: Relay, run_id: str = "job1") -> str:
    """The refusal of a worker's session through a relay that is let in by nobody."""
    hello = session_pb2.Hello(run_id=run_id, processes=[PROCESS], protocol_version=1)
    with grpc.insecure_channel(relay.listen) as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        session = stub.Connect(iter([session_pb2.ConnectRequest(hello=hello)]), timeout=PATIENCE)
        with pytest.raises(grpc.RpcError) as ended:
            assert next(session).HasField("refusal")
            next(session)
    return reason_of(ended.value)


PROCESS = session_pb2.Process(rank=0, incarnation="a", host="node-0", pid=1)


def test_idle_relay_was_not_needed(cut_off: Relay):
    assert reached(cut_off) == (0, 0)


def test_a_worker_asked(cut_off: Relay):
    assert refused(cut_off) == "RELAY_CUT_OFF"
    assert reached(cut_off) == (0, 1)


def test_somebody_asked_for_a_key(cut_off: Relay):
    with grpc.insecure_channel(cut_off.listen) as channel:
        stub = store_pb2_grpc.StoreServiceStub(channel)
        with pytest.raises(grpc.RpcError):
            stub.Get(store_pb2.StoreServiceGetRequest(run_id="job1", keys=["a"]), timeout=PATIENCE)
    assert reached(cut_off) == (0, 1)


def test_a_coordinator_that_refuses_was_reached(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator, Relay(tmp_path, coordinator.endpoint) as relay:
        assert refused(relay, "r" * 500) == "INVALID_ARGUMENT"
        assert reached(relay) == (1, 0)
