"""CoordinatorService: how the coordinator is, for those who look after it."""

import statistics
from typing import Any

from muster.service.driver import Driver
from muster.service.version import VERSION
from muster.service.wire import timestamp_to_pb
from muster.v1 import coordinator_pb2, coordinator_pb2_grpc


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Serves ``muster.v1.CoordinatorService``."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def Status(  # noqa: N802
        self, request: coordinator_pb2.StatusRequest, context: Any
    ) -> coordinator_pb2.StatusResponse:
        """Tell version, clock, and how long commits take."""
        epoch, now = await self._driver.query(lambda core, now: (core.epoch, now))
        return coordinator_pb2.StatusResponse(
            version=VERSION,
            epoch=epoch,
            now=timestamp_to_pb(now.wall),
            commits=_times(list(self._driver.commit_seconds)),
        )


def _times(seconds: list[float]) -> coordinator_pb2.CommitTimes:
    return coordinator_pb2.CommitTimes(
        count=len(seconds),
        median_us=round(statistics.median_low(seconds or [0.0]) * 1_000_000),
        longest_us=round(max(seconds, default=0.0) * 1_000_000),
    )
