"""BarrierService: barriers for callers without a session, and for people."""

import hashlib
from functools import cached_property
from typing import Any

from muster.service.core import barrier_views
from muster.service.core.vocabulary.events import Abort, Arrival, ArriveOnce, ProcessInfo
from muster.service.core.vocabulary.model import Decision
from muster.service.driver import Driver
from muster.service.rpc import codec
from muster.service.rpc.call import Call, LongPolls
from muster.service.rpc.interceptors.guard import ADMISSION
from muster.service.wire import barrier_to_pb, decision_to_pb, write_report_from_pb
from muster.v1 import barrier_pb2, barrier_pb2_grpc

MAX_HISTORY = 1_000
"""Decided barriers of one group that List shows at most."""


class _Outcome:
    """A decision and its response, which is made at most once."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.payload_bytes = decision.payload_bytes

    @cached_property
    def response(self) -> barrier_pb2.ArriveResponse:
        """The response to every rank."""
        return barrier_pb2.ArriveResponse(decision=decision_to_pb(self.decision))


class BarrierServicer(barrier_pb2_grpc.BarrierServiceServicer):
    """Serves ``muster.v1.BarrierService``."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._polls = LongPolls(driver)
        self._newest: _Outcome | None = None
        """All ranks ask for the same outcome, and payloads may be large."""

    async def Arrive(  # noqa: N802
        self, request: barrier_pb2.ArriveRequest, context: Any
    ) -> barrier_pb2.ArriveResponse:
        """Arrive, and wait for the decision."""
        # One incarnation for each group, so that concurrent calls for two groups do not supersede each other.
        group = hashlib.blake2s(request.prefix.encode(), digest_size=4).hexdigest()
        incarnation = f"{request.incarnation or 'unary'}/{group}"
        process = ProcessInfo(request.rank, incarnation, request.host or "unknown host", request.pid)
        failure = request.failure if request.HasField("failure") else None
        report = write_report_from_pb(request.write) if request.HasField("write") else None
        participants = codec.at_most("participants", request.participants)
        with self._polls.open(Decision) as call:
            self._driver.submit(
                ArriveOnce(
                    session=call.id,
                    run_id=request.run_id,
                    generation=request.generation,
                    process=process,
                    prefix=request.prefix,
                    world_size=request.world_size,
                    participants=participants,
                    sequence=request.sequence if request.HasField("sequence") else None,
                    timeout=request.timeout_ms / 1000,
                    arrival=Arrival(request.rank, request.payload, failure, report),
                )
            )
            return self._response(await call.answer())

    def _response(self, decision: Decision) -> barrier_pb2.ArriveResponse:
        if self._newest is None or self._newest.decision is not decision:
            self._newest = _Outcome(decision)
        ADMISSION.get().check_place(self._newest.payload_bytes)
        return self._newest.response

    async def Abort(  # noqa: N802
        self, request: barrier_pb2.AbortRequest, context: Any
    ) -> barrier_pb2.AbortResponse:
        """End an open barrier for everyone."""
        sequence = request.sequence if request.HasField("sequence") else None
        with Call(self._driver, Decision) as call:
            self._driver.submit(Abort(call.id, request.run_id, request.prefix, request.reason, sequence))
            return barrier_pb2.AbortResponse(decision=decision_to_pb(await call.answer()))

    async def Get(  # noqa: N802
        self, request: barrier_pb2.BarrierServiceGetRequest, context: Any
    ) -> barrier_pb2.BarrierServiceGetResponse:
        """Show one barrier."""
        sequence = request.sequence if request.HasField("sequence") else None
        view = await self._driver.query(
            lambda core, now: barrier_views.barrier(core, request.run_id, request.prefix, sequence, now)
        )
        return barrier_pb2.BarrierServiceGetResponse(barrier=barrier_to_pb(view))

    async def List(  # noqa: N802
        self, request: barrier_pb2.BarrierServiceListRequest, context: Any
    ) -> barrier_pb2.BarrierServiceListResponse:
        """Show the newest barriers of every group."""
        history = min(request.history or 1, MAX_HISTORY)
        shown = ADMISSION.get().shows
        found = await self._driver.query(
            lambda core, now: list(barrier_views.barriers(core, request.run_id, history, now, shown))
        )
        return barrier_pb2.BarrierServiceListResponse(barriers=[barrier_to_pb(view) for view in found])

    def drain(self) -> None:
        """End all waiting calls. The callers ask again."""
        self._polls.drain()
