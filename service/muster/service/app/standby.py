"""The two ports of a replica that does not lead."""

import asyncio
from collections.abc import Sequence

import structlog

from muster.service.address import Address
from muster.service.app.context import AppContext
from muster.service.app.ports import (
    keep_bounded,
    max_connections,
    rpc_guard,
    site_runner,
    start_rpc,
    start_site,
)
from muster.service.leadership.replica import Replica
from muster.service.rpc.standby import StandbyServer
from muster.service.version import VERSION
from muster.service.web.standby import build_standby_site
from muster.v1 import coordinator_pb2


class Standby:
    """The two ports of a replica that does not lead.

    Args:
        context: settings, security and metrics of the process.
        replica: knows the leader and the other replicas.
    """

    def __init__(self, context: AppContext, replica: Replica) -> None:
        config = context.config
        self._context = context
        self._replica = replica
        self._rpc = StandbyServer(
            replica,
            keepalive=config.keepalive,
            limits=config.limits,
            observer=context.metrics,
            guard=rpc_guard(config.security, context.security),
            max_connections=max_connections(),
        )
        site = build_standby_site(
            replica, lambda: replicas_to_pb(replica), lambda: context.metrics.registry, self._why_not_ready
        )
        self._site = site_runner(site, config, context.security)
        self._closed = False
        self._upkeep: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve both ports.

        Raises:
            StartError: a port cannot be bound.
        """
        config, security = self._context.config, self._context.security
        port = await start_rpc(self._rpc.server, config.listen, security)
        self._upkeep = asyncio.create_task(keep_bounded(config.security, port))
        http = await start_site(self._site, config, security)
        structlog.get_logger().info(
            "standing by",
            grpc=str(Address(config.listen.host, port)),
            http=str(http),
            address=self._replica.record.address,
            state=config.state,
            version=VERSION,
        )

    async def close(self) -> None:
        """Close both ports."""
        if self._closed:
            return
        self._closed = True
        if self._upkeep is not None:
            self._upkeep.cancel()
        await self._rpc.close()
        await self._site.cleanup()

    def _why_not_ready(self) -> str | None:
        """Return why this standby could not take over; None if it could."""
        if self._context.stop.is_set():
            return "draining"
        return self._replica.trouble or self._replica.members.fault or None


def replicas_to_pb(replica: Replica) -> Sequence[coordinator_pb2.Replica]:
    """Convert all replicas that one of them knows to messages."""
    leader = replica.members.leader
    return [
        coordinator_pb2.Replica(
            address=record.address,
            version=record.version,
            started_at=record.started_at,
            leads=leader is not None and record.address == leader.address,
        )
        for record in replica.members.replicas
    ]
