"""The server of a replica that does not lead: it tells callers which replica leads."""

import asyncio
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from muster.client.protocol import NOT_LEADER_HEADER
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.rpc.interceptors.guard import GuardInterceptor
from muster.service.rpc.interceptors.refusals import CallInterceptor, CallObserver
from muster.service.rpc.server import HEALTH, METHODS, SERVICES, methods_of, options
from muster.service.rpc.servicers.health import HealthServicer
from muster.service.waiting import first
from muster.serving.keepalive import Keepalive

HOLD_SECONDS = 1.0
"""Seconds for which a call with the header waits for another leader, so that it need not ask again. Then the
caller tries the old leader again, which must be well within the reset grace."""
CONNECTION_AGE_MS = 5_000
"""Age at which a connection ends. A client of an older version, which reaches one of several replicas by one
name, would otherwise ask the same replica for ever."""
GRACE = 0.1
"""Seconds for the last answers when the server closes."""
PYTHON = "grpc-python"
"""The user agent of Python's clients begins so."""


class Cluster(Protocol):
    """A replica's knowledge of the leader and the other replicas."""

    def leader_elsewhere(self) -> str:
        """Return the address of the leader that answers calls; empty: there is no leader but this replica."""
        ...

    def addresses(self) -> list[str]:
        """Return the addresses of all replicas."""
        ...

    @property
    def news(self) -> asyncio.Event:
        """Set when the leader or the replicas may have changed since this event was read."""
        ...


class StandbyHandler(grpc.GenericRpcHandler):
    """Answers every call of Muster's methods with NOT_LEADER.

    Args:
        cluster: knows the leader.
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
        """Answer all waiting calls."""
        self._closing.set()

    async def _refuse(self, _: object, context: Any) -> None:
        metadata = dict(context.invocation_metadata() or ())
        unreached = metadata.get(NOT_LEADER_HEADER)
        if unreached is not None:
            await self._hold(unreached)
        raise self._refusal(unreached is None and str(metadata.get("user-agent", "")).startswith(PYTHON))

    async def _hold(self, unreached: str) -> None:
        """Wait for a leader other than the one that the caller could not reach."""
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
        # An SDK of 0.1 does not know NOT_LEADER, and would fail its job. It retries after this reason.
        reason = Reason.COORDINATOR_DRAINING if old else Reason.NOT_LEADER
        return Refusal(reason, sentence, **metadata)


class StandbyServer:
    """The assembled server of a standby; the caller binds a port and starts it.

    Args:
        cluster: knows the leader.
        keepalive: when the server pings clients.
        limits: the coordinator's bounds.
        observer: is told of calls.
        guard: checks calls; without a guard every caller gets an answer.
        max_connections: limit of open connections.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        keepalive: Keepalive,
        limits: Limits,
        observer: CallObserver,
        guard: GuardInterceptor | None,
        max_connections: int,
    ) -> None:
        kinds = METHODS | methods_of(HEALTH)
        interceptors = [CallInterceptor(observer, kinds), *([guard] if guard is not None else [])]
        age = [("grpc.max_connection_age_ms", CONNECTION_AGE_MS)]
        self.server = grpc.aio.server(
            interceptors=interceptors, options=[*options(keepalive, limits, max_connections), *age]
        )
        self._handler = StandbyHandler(cluster)
        self.server.add_generic_rpc_handlers((self._handler,))
        names = [service.full_name for service in SERVICES]
        # The process is healthy, but it does not serve the leader's services.
        self._health = HealthServicer((), not_served=names)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection([*names, HEALTH.full_name, reflection.SERVICE_NAME], self.server)

    async def close(self) -> None:
        """Answer waiting calls, and close the port."""
        self._handler.close()
        self._health.drain()
        await self.server.stop(GRACE)
