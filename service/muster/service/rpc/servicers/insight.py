"""InsightService: what the processes of a run are doing, for people."""

import asyncio
from typing import Any

from muster.service.core import probes
from muster.service.draining import DRAINING
from muster.service.driver import Driver
from muster.service.insight.crowds import stacks
from muster.service.insight.inspector import Inspector
from muster.service.rpc.codec import at_most
from muster.v1 import insight_pb2, insight_pb2_grpc


class InsightServicer(insight_pb2_grpc.InsightServiceServicer):
    """Serves ``muster.v1.InsightService``."""

    def __init__(self, driver: Driver, inspector: Inspector) -> None:
        self._driver = driver
        self._inspector = inspector

    async def Stacks(  # noqa: N802
        self, request: insight_pb2.StacksRequest, context: Any
    ) -> insight_pb2.StacksResponse:
        """Ask processes where they stand, and group those at the same place."""
        ranks = at_most("ranks", request.ranks)
        processes = await self._driver.query(
            lambda core, _: probes.find_probe_targets(core, request.run_id, ranks, request.missing)
        )
        answers = await self._inspector.ask(processes)
        if self._driver.retired:
            raise DRAINING  # A process without an answer may have been asked to connect elsewhere.
        # Thousands of reports take a good part of a second, and must not delay barriers.
        return await asyncio.to_thread(stacks, answers)
