"""The server of a replica that does not lead: it lets callers in, and tells them who does."""

import asyncio
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.replica_list import NOT_LEADER_HEADER
from muster.service.rpc.interceptors.guard import GuardInterceptor
from muster.service.rpc.interceptors.refusals import CallInterceptor, CallObserver
from muster.service.rpc.server import HEALTH, METHODS, SERVICES, methods_of, options
from muster.service.rpc.servicers.health import HealthServicer
from muster.service.waiting import first

HOLD_SECONDS = 2.0
"""For so long a call with the header is held while no other leader is known, and need not ask again."""
CONNECTION_AGE_MS = 5_000
"""Then a connection ends: a client of an older version, which finds one of several replicas behind a name,
would ask the same one for ever."""
GRACE = 0.1
"""Seconds for the last answers, when it closes."""
PYTHON = "grpc-python"
"""How the user agent of Python's clients begins."""


class Cluster(Protocol):
    """Who leads, as a replica knows it."""

    def leader_elsewhere(self) -> str:
        """The address of the leader that answers calls, unless it is this replica itself; empty: nobody."""
        ...

    def addresses(self) -> list[str]:
        """Those of all replicas that are there."""
        ...

    @property
    def news(self) -> asyncio.Event:
        """Is set when something of this may have changed since it was taken."""
        ...


class StandbyHandler(grpc.GenericRpcHandler):
    """Answers every call of Muster's with NOT_LEADER.

    Args:
        cluster: who leads.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._closing = asyncio.Event()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """See ``grpc.GenericRpcHandler``."""
        if handler_call_details.method not in METHODS:
            return None
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    def close(self) -> None:
        """Hold nothing any more."""
        self._closing.set()

    async def _refuse(self, _: object, context: Any) -> None:
        metadata = dict(context.invocation_metadata() or ())
        unreached = metadata.get(NOT_LEADER_HEADER)
        if unreached is not None:
            await self._hold(unreached)
        raise self._refusal(unreached is None and str(metadata.get("user-agent", "")).startswith(PYTHON))

    async def _hold(self, unreached: str) -> None:
        """Wait for another leader than the one that the caller could not reach."""
        try:
            async with asyncio.timeout(HOLD_SECONDS):
                while not self._closing.is_set():
                    news = self._cluster.news
                    if self._cluster.leader_elsewhere() not in ("", unreached):
                        return
                    await first(news.wait(), self._closing.wait())
        except TimeoutError:
            return

    def _refusal(self, old: bool) -> Refusal:
        leader, replicas = self._cluster.leader_elsewhere(), ",".join(self._cluster.addresses())
        metadata = {"replicas": replicas} | ({"leader": leader} if leader else {})
        sentence = (
            f"this replica does not lead: {leader} does. Call it there."
            if leader
            else "this replica does not lead, and no other one does at this moment. Call again."
        )
        # An SDK of 0.1 knows no NOT_LEADER, and would fail its job; this it takes for what it is.
        reason = Reason.COORDINATOR_DRAINING if old else Reason.NOT_LEADER
        return Refusal(reason, sentence, **metadata)


class StandbyServer:
    """The assembled server of a standby; the caller binds a port and starts it.

    Args:
        cluster: who leads.
        session_ttl: seconds, as of the coordinator.
        limits: the coordinator's bounds.
        observer: who is told of calls.
        guard: lets calls in; without one everyone is told.
        max_connections: how many may be open at once.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        session_ttl: float,
        limits: Limits,
        observer: CallObserver,
        guard: GuardInterceptor | None,
        max_connections: int,
    ) -> None:
        kinds = METHODS | methods_of(HEALTH)
        interceptors = [CallInterceptor(observer, kinds), *([guard] if guard is not None else [])]
        age = [("grpc.max_connection_age_ms", CONNECTION_AGE_MS)]
        self.server = grpc.aio.server(
            interceptors=interceptors, options=[*options(session_ttl, limits, max_connections), *age]
        )
        self._handler = StandbyHandler(cluster)
        self.server.add_generic_rpc_handlers((self._handler,))
        names = [service.full_name for service in SERVICES]
        # The process is well; what it would serve as a leader, it does not.
        self._health = HealthServicer((), not_served=names)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection([*names, HEALTH.full_name, reflection.SERVICE_NAME], self.server)

    async def close(self) -> None:
        """Answer who is held, and let the port go."""
        self._handler.close()
        self._health.drain()
        await self.server.stop(GRACE)
