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
        """Ask where processes stand, and tell of those at the same place as one."""
        ranks = at_most("ranks", request.ranks)
        processes = await self._driver.query(
            lambda core, _: probes.find_probe_targets(core, request.run_id, ranks, request.missing)
        )
        sightings = await self._inspector.ask(processes)
        if self._driver.retired:
            raise DRAINING  # Who has not answered may have been asked to connect elsewhere.
        # Thousands of reports are a good part of a second's work, and barriers wait for nobody's question.
        return await asyncio.to_thread(stacks, sightings)
