"""Waits until ranks have arrived at a barrier, wait for a key, or are connected again."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import grpc

from lab.patience import PATIENCE, until
from muster.v1 import barrier_pb2, barrier_pb2_grpc
from muster.worker import CoordinatorStore


def arrived(endpoint: str, run_id: str = "job") -> int:
    """How many ranks wait at the open barriers of a run; 0 also while nobody answers."""
    asked = barrier_pb2.BarrierServiceListRequest(run_id=run_id)
    with grpc.insecure_channel(endpoint) as channel, suppress(grpc.RpcError):
        shown = barrier_pb2_grpc.BarrierServiceStub(channel).List(asked, timeout=PATIENCE)
        return sum(one.arrived for one in shown.barriers if not one.HasField("decision"))
    return 0


def wait_for_arrivals(endpoint: str, count: int, run_id: str = "job") -> None:
    """Until so many ranks wait at the barriers of a run."""
    until(
        lambda: arrived(endpoint, run_id) == count,
        lambda: f"of {count} ranks {arrived(endpoint, run_id)} have arrived",
    )


def wait_until_asked(store: CoordinatorStore) -> None:
    """Until another thread asks something of this store, and is about to wait for the answer."""
    until(lambda: store._line is not None and store._line._turn.locked(), "it asks nothing")


def until_called_again(sessions: Sequence[Any], calls: Sequence[Any]) -> None:
    """Until each session is connected by another call than before."""
    until(
        lambda: all(
            one._stream.call is not call and one._stream.connected
            for one, call in zip(sessions, calls, strict=True)
        )
    )
