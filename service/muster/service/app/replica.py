"""One of several coordinators: it stands by until it leads, and serves while it may lead."""

import asyncio
import math
from collections.abc import Mapping

import structlog

from muster.client.protocol import TTL_PINGS
from muster.service.address import Address
from muster.service.app import coordinator
from muster.service.app.context import AppContext
from muster.service.app.coordinator import ReplicaHooks
from muster.service.app.ports import StartError
from muster.service.app.standby import Standby, replicas_to_pb
from muster.service.etcd.client import Etcd
from muster.service.etcd.errors import EtcdError
from muster.service.etcd.location import Location
from muster.service.etcd.versions import check_versions
from muster.service.leadership.election import Lead
from muster.service.leadership.replica import LeadLost, Replica
from muster.service.storage.engine import LeadLostError
from muster.service.storage.etcd import EtcdEngine
from muster.service.storage.standby_cache import StandbyCache
from muster.service.telemetry.cluster import ClusterMetrics, EtcdCalls
from muster.service.version import VERSION
from muster.service.wire import timestamp_to_pb
from muster.v1 import state_pb2

ATTEMPTS = 3
"""Attempts of one lease renewal within the lease's TTL: a member that does not answer uses one."""


async def run(context: AppContext) -> None:
    """Stand by, lead, and end.

    Raises:
        StartError: a port cannot be bound; or etcd refuses.
        StorageError: the state cannot be opened, read or written; or another replica may lead.
    """
    config = context.config
    location = Location.parse(config.state)
    etcd = Etcd(
        location.endpoints,
        config.etcd,
        attempt_timeout=config.lease_ttl / ATTEMPTS,
        observer=EtcdCalls(context.metrics.registry),
    )
    record = state_pb2.ReplicaRecord(
        address=str(_advertised(config.advertise, config.listen)),
        version=VERSION,
        started_at=timestamp_to_pb(context.clock.now().wall),
    )
    try:
        unreachable = await asyncio.to_thread(check_versions, etcd, config.lease_ttl)
        if unreachable:
            structlog.get_logger().warning("etcd.unreachable", reason=unreachable)
        replica = Replica(etcd, location.prefix, record, math.ceil(config.lease_ttl))
        counting = asyncio.create_task(ClusterMetrics(context.metrics.registry, replica).follow())
        try:
            await _serve(context, replica, etcd, location)
        finally:
            counting.cancel()
            await replica.resign()
    except LeadLost as error:
        raise LeadLostError(f"{location}: {error}. Another replica may lead; this one ends.") from error
    except EtcdError as error:
        raise StartError(f"cannot use {location}: {error}.") from error
    finally:
        etcd.close()


async def _serve(context: AppContext, replica: Replica, etcd: Etcd, location: Location) -> None:
    cache = StandbyCache(etcd, location)
    standby = Standby(context, replica)
    await standby.start()
    try:
        lead = await _until_elected(context, replica)
        if lead is None:
            return
        structlog.get_logger().info("elected", address=replica.record.address, revision=lead.revision)

        def copy(revision: int) -> Mapping[bytes, bytes]:
            return cache.rows(revision, context.config.lease_ttl)

        hooks = ReplicaHooks(
            replicas=lambda: replicas_to_pb(replica),
            keepalive_ms=round(replica.ttl * 1000 / TTL_PINGS),
            before_serving=standby.close,
            on_serving=replica.announce,
            decode=cache.records,
            on_retired=replica.step_down,
            lead_lost=replica.lost,
        )
        await coordinator.run(context, EtcdEngine(etcd, location, lead, copy), hooks)
    finally:
        cache.close()
        await standby.close()


async def _until_elected(context: AppContext, replica: Replica) -> Lead | None:
    """Wait until this replica leads; None if the process is told to stop before."""
    elected = asyncio.ensure_future(replica.elected())
    stopped = asyncio.ensure_future(context.stop.wait())
    freshness = asyncio.create_task(context.security.keep_fresh())
    try:
        await asyncio.wait([elected, stopped, freshness], return_when=asyncio.FIRST_COMPLETED)
        if freshness.done():
            freshness.result()
        if elected.done():
            return elected.result()
        return None
    finally:
        for task in (elected, stopped, freshness):
            task.cancel()
        # The cancelled task gives its lease up.
        await asyncio.wait([elected])


def _advertised(given: Address | None, listen: Address) -> Address:
    address = given or listen
    if address.port == 0 or address.host in ("0.0.0.0", "::"):
        raise StartError(
            f"{address} is no address at which workers reach this replica. Give --advertise HOST:PORT, with "
            "the name that they know it by."
        )
    return address
