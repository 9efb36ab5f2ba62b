"""CoordinatorService: the state of the coordinator, for operators."""

import statistics
from typing import Any

from muster.client.protocol import RELAY_HEADER
from muster.service.driver import Driver
from muster.service.replica_list import Replicas, no_replicas
from muster.service.rpc.interceptors.guard import ADMISSION
from muster.service.security.grants import Grant
from muster.service.version import VERSION
from muster.service.wire import timestamp_to_pb
from muster.v1 import coordinator_pb2, coordinator_pb2_grpc


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Serves ``muster.v1.CoordinatorService``."""

    def __init__(self, driver: Driver, replicas: Replicas = no_replicas) -> None:
        self._driver = driver
        self._replicas = replicas

    async def Status(  # noqa: N802
        self, request: coordinator_pb2.StatusRequest, context: Any
    ) -> coordinator_pb2.StatusResponse:
        """Return version, clock, commit times, and what the caller may do."""
        relay = dict(context.invocation_metadata() or ()).get(RELAY_HEADER, b"")
        epoch, now = await self._driver.query(lambda core, now: (core.epoch, now))
        return coordinator_pb2.StatusResponse(
            version=VERSION,
            epoch=epoch,
            now=timestamp_to_pb(now.wall),
            commits=_times(list(self._driver.commit_seconds)),
            caller=_caller(ADMISSION.get().grant),
            relay=relay.decode(errors="replace"),
        )

    async def Replicas(  # noqa: N802
        self, request: coordinator_pb2.ReplicasRequest, context: Any
    ) -> coordinator_pb2.ReplicasResponse:
        """List the coordinators of this state."""
        # The driver answers no query if another replica may lead.
        return await self._driver.query(
            lambda core, now: coordinator_pb2.ReplicasResponse(replicas=self._replicas())
        )


def _times(seconds: list[float]) -> coordinator_pb2.CommitTimes:
    return coordinator_pb2.CommitTimes(
        count=len(seconds),
        median_us=round(statistics.median_low(seconds) * 1_000_000),
        longest_us=round(max(seconds) * 1_000_000),
    )


def _caller(grant: Grant | None) -> coordinator_pb2.Caller | None:
    if grant is None:
        return None
    return coordinator_pb2.Caller(
        token_name=grant.name,
        role=coordinator_pb2.Role.Value(f"ROLE_{grant.role.name}"),
        run_patterns=grant.runs,
        node_patterns=grant.nodes,
    )
