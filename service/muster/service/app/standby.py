"""What a replica serves until it leads."""

import structlog

from muster.service.address import Address
from muster.service.app.ports import (
    most_connections,
    rpc_guard,
    site_runner,
    start_rpc,
    start_site,
    warn_if_open,
)
from muster.service.app.replicas import replicas
from muster.service.app.surroundings import Surroundings
from muster.service.leadership.replica import Replica
from muster.service.rpc.standby import StandbyServer
from muster.service.version import VERSION
from muster.service.web.standby import build_standby_site


class Standby:
    """The two ports of a replica that does not lead.

    Args:
        around: what it runs in.
        replica: who leads, as it knows it.
    """

    def __init__(self, around: Surroundings, replica: Replica) -> None:
        config = around.config
        self._around = around
        self._replica = replica
        self._rpc = StandbyServer(
            replica,
            session_ttl=config.session_ttl,
            limits=config.limits,
            observer=around.metrics,
            guard=rpc_guard(config.security, around.gate),
            max_connections=most_connections(),
        )
        site = build_standby_site(
            replica, lambda: replicas(replica), lambda: around.metrics.registry, self._why_not_ready
        )
        self._site = site_runner(site, config, around.gate)
        self._closed = False

    async def start(self) -> None:
        """Serve both ports.

        Raises:
            StartError: one cannot be bound.
        """
        config, gate = self._around.config, self._around.gate
        port = await start_rpc(self._rpc.server, config.listen, gate)
        http = await start_site(self._site, config, gate)
        warn_if_open(config)
        structlog.get_logger().info(
            "standing by",
            grpc=str(Address(config.listen.host, port)),
            http=str(http),
            address=self._replica.record.address,
            state=config.state,
            version=VERSION,
        )

    async def close(self) -> None:
        """Let both ports go."""
        if self._closed:
            return
        self._closed = True
        await self._rpc.close()
        await self._site.cleanup()

    def _why_not_ready(self) -> str | None:
        """A standby is ready when it could take over."""
        if self._around.stop.is_set():
            return "draining"
        return self._replica.trouble or self._replica.members.fault or None
