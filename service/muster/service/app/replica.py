"""One of several coordinators: it stands by until it leads, and serves until it may lead no longer."""

import asyncio
import math
from collections.abc import Mapping

import structlog

from muster.client.protocol import TTL_PINGS
from muster.service.address import Address
from muster.service.app import coordinator
from muster.service.app.coordinator import Part
from muster.service.app.ports import StartError
from muster.service.app.replicas import replicas
from muster.service.app.standby import Standby
from muster.service.app.surroundings import Surroundings
from muster.service.etcd.client import Etcd
from muster.service.etcd.errors import EtcdError
from muster.service.etcd.location import Location
from muster.service.etcd.versions import check_versions
from muster.service.leadership.election import Lead
from muster.service.leadership.replica import LeadLost, Replica
from muster.service.storage.engine import LeadLostError
from muster.service.storage.etcd import EtcdEngine
from muster.service.storage.warm import Warm
from muster.service.telemetry.cluster import ClusterMetrics, EtcdCalls
from muster.service.version import VERSION
from muster.service.wire import timestamp_to_pb
from muster.v1 import state_pb2

ATTEMPTS = 3
"""Of one renewal, in the time of a lease: a member that does not answer costs one of them."""


async def run(around: Surroundings) -> None:
    """Stand by, lead, and end.

    Raises:
        StartError: a port cannot be bound; or etcd refuses.
        StorageError: the state cannot be opened, read or written; or another replica leads, or may.
    """
    config = around.config
    location = Location.parse(config.state)
    etcd = Etcd(
        location.endpoints,
        config.etcd,
        attempt_timeout=config.lease_ttl / ATTEMPTS,
        observer=EtcdCalls(around.metrics.registry),
    )
    record = state_pb2.ReplicaRecord(
        address=str(_advertised(config.advertise, config.listen)),
        version=VERSION,
        started_at=timestamp_to_pb(around.clock.now().wall),
    )
    try:
        unreachable = await asyncio.to_thread(check_versions, etcd, config.lease_ttl)
        if unreachable:
            structlog.get_logger().warning("etcd.unreachable", reason=unreachable)
        replica = Replica(etcd, location.prefix, record, math.ceil(config.lease_ttl))
        counting = asyncio.create_task(ClusterMetrics(around.metrics.registry, replica).follow())
        try:
            await _serve(around, replica, etcd, location)
        finally:
            counting.cancel()
            await replica.resign()
    except LeadLost as error:
        raise LeadLostError(f"{location}: {error}. Another replica may lead; this one ends.") from error
    except EtcdError as error:
        raise StartError(f"cannot use {location}: {error}.") from error
    finally:
        etcd.close()


async def _serve(around: Surroundings, replica: Replica, etcd: Etcd, location: Location) -> None:
    warm = Warm(etcd, location)
    standby = Standby(around, replica)
    await standby.start()
    try:
        lead = await _until_elected(around, replica)
        if lead is None:
            return
        structlog.get_logger().info("elected", address=replica.record.address, revision=lead.revision)

        def copy(revision: int) -> Mapping[bytes, bytes]:
            return warm.rows(revision, around.config.lease_ttl)

        part = Part(
            replicas=lambda: replicas(replica),
            keepalive_ms=round(replica.ttl * 1000 / TTL_PINGS),
            about_to_serve=standby.close,
            serving=replica.announce,
            decode=warm.records,
            retired=replica.step_down,
            deposed=replica.lost,
        )
        await coordinator.run(around, EtcdEngine(etcd, location, lead, copy), part)
    finally:
        warm.close()
        await standby.close()


async def _until_elected(around: Surroundings, replica: Replica) -> Lead | None:
    """Wait until this replica leads; None if it is to stop before."""
    elected = asyncio.ensure_future(replica.elected())
    stopped = asyncio.ensure_future(around.stop.wait())
    freshness = asyncio.create_task(around.gate.keep_fresh())
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
        # Whoever takes part gives its lease up at the end.
        await asyncio.wait([elected])


def _advertised(given: Address | None, listen: Address) -> Address:
    address = given or listen
    if address.port == 0 or address.host in ("0.0.0.0", "::"):
        raise StartError(
            f"{address} is no address at which workers reach this replica. Give --advertise HOST:PORT, with "
            "the name that they know it by."
        )
    return address
