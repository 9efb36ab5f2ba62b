"""The function that assembles the gRPC server: options, interceptors, services."""

from dataclasses import dataclass

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from muster.client.protocol import MESSAGE_HEADROOM
from muster.service.core.vocabulary.limits import Limits
from muster.service.driver import Driver
from muster.service.insight.inspector import Inspector
from muster.service.replica_list import Replicas, no_replicas
from muster.service.rpc.interceptors.audit import AuditInterceptor
from muster.service.rpc.interceptors.guard import GuardInterceptor
from muster.service.rpc.interceptors.refusals import CallInterceptor, CallObserver
from muster.service.rpc.servicers.barrier import BarrierServicer
from muster.service.rpc.servicers.coordinator import CoordinatorServicer
from muster.service.rpc.servicers.health import HealthServicer
from muster.service.rpc.servicers.insight import InsightServicer
from muster.service.rpc.servicers.local import LocalCheckpointServicer
from muster.service.rpc.servicers.rendezvous import RendezvousServicer
from muster.service.rpc.servicers.run import RunServicer
from muster.service.rpc.servicers.session import SessionServicer
from muster.service.rpc.servicers.store import StoreServicer
from muster.service.security.audit import Write
from muster.service.snapshots import Snapshots
from muster.serving.keepalive import Keepalive
from muster.serving.options import MAX_CONNECTIONS, server_options
from muster.serving.queued import MAX_BYTES
from muster.v1 import (
    barrier_pb2,
    barrier_pb2_grpc,
    coordinator_pb2,
    coordinator_pb2_grpc,
    insight_pb2,
    insight_pb2_grpc,
    local_pb2,
    local_pb2_grpc,
    rendezvous_pb2,
    rendezvous_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
    session_pb2,
    store_pb2,
    store_pb2_grpc,
)

SERVICES = (
    session_pb2.DESCRIPTOR.services_by_name["SessionService"],
    barrier_pb2.DESCRIPTOR.services_by_name["BarrierService"],
    rendezvous_pb2.DESCRIPTOR.services_by_name["RendezvousService"],
    run_pb2.DESCRIPTOR.services_by_name["RunService"],
    store_pb2.DESCRIPTOR.services_by_name["StoreService"],
    local_pb2.DESCRIPTOR.services_by_name["LocalCheckpointService"],
    insight_pb2.DESCRIPTOR.services_by_name["InsightService"],
    coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"],
)

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]


def _kind(method: MethodDescriptor) -> str:
    if method.client_streaming:
        return "bidi_stream"
    return "server_stream" if method.server_streaming else "unary"


def methods_of(*services: ServiceDescriptor) -> dict[str, str]:
    """Return the paths of all methods of some services, with their kinds."""
    return {f"/{service.full_name}/{m.name}": _kind(m) for service in services for m in service.methods}


METHODS = methods_of(*SERVICES)
"""All methods of Muster, each with its kind in go-grpc-middleware's words."""
RANKS_PER_MESSAGE = 16
"""Ranks of one node, whose payloads one message may carry."""
UNSENT_GATHERS = 8
"""Barriers whose payloads may wait for a peer that does not read."""
VALUES_PER_MESSAGE = 2
"""Store values of one message: the expected and the desired one."""


@dataclass(frozen=True, slots=True)
class RpcServer:
    """The assembled server, and the servicers that a drain ends."""

    server: grpc.aio.Server
    health: HealthServicer
    sessions: SessionServicer
    barriers: BarrierServicer
    rendezvous: RendezvousServicer
    stores: StoreServicer
    local: LocalCheckpointServicer

    async def drain(self, grace: float) -> None:
        """Ask all clients to connect again, and stop.

        Args:
            grace: seconds for calls in flight.
        """
        self.health.drain()
        self.sessions.drain()
        self.barriers.drain()
        self.rendezvous.drain()
        self.stores.drain()
        self.local.drain()
        await self.server.stop(grace)


def max_message_bytes(limits: Limits) -> int:
    """Return the size limit of one message from a client, in bytes."""
    payloads = limits.max_payload_bytes * RANKS_PER_MESSAGE
    values = limits.max_store_value_bytes * VALUES_PER_MESSAGE
    return max(payloads, values) + MESSAGE_HEADROOM


def options(keepalive: Keepalive, limits: Limits, max_connections: int) -> list[tuple[str, int]]:
    """Return the channel options of the server."""
    return server_options(
        max_streams=limits.max_sessions,
        max_connections=max_connections,
        max_message_bytes=max_message_bytes(limits),
        keepalive=keepalive,
    )


def build_server(
    driver: Driver,
    inspector: Inspector,
    *,
    keepalive: Keepalive,
    limits: Limits,
    observer: CallObserver,
    guard: GuardInterceptor | None = None,
    max_connections: int = MAX_CONNECTIONS,
    replicas: Replicas = no_replicas,
    keepalive_ms: int = 0,
    snapshots: Snapshots | None = None,
    audit: Write | None = None,
) -> RpcServer:
    """Assemble the server; the caller binds a port and starts it.

    Args:
        driver: takes the events of all services.
        inspector: asks processes what they are doing.
        keepalive: when the server pings clients.
        limits: the coordinator's bounds.
        observer: is told of calls.
        guard: checks calls; without a guard everyone may do everything.
        max_connections: limit of open connections.
        replicas: lists the coordinators of this state.
        keepalive_ms: time without data until clients ping; 0: a third of the session TTL.
        snapshots: views of runs that are shared with the status page; None: the server's own.
        audit: takes the entries of the audit log, and needs the guard; None: no audit log.
    """
    kinds = METHODS | methods_of(HEALTH)
    audited = [AuditInterceptor(audit, kinds)] if audit is not None else []
    interceptors = [CallInterceptor(observer, kinds), *audited, *([guard] if guard is not None else [])]
    server = grpc.aio.server(interceptors=interceptors, options=options(keepalive, limits, max_connections))

    def addresses() -> list[str]:
        return [replica.address for replica in replicas()]

    sessions = SessionServicer(
        driver,
        max_open=2 * limits.max_sessions,
        replicas=addresses,
        keepalive_ms=keepalive_ms,
        on_inspected=inspector.hear,
        max_unsent_bytes=UNSENT_GATHERS * limits.max_gather_bytes + MESSAGE_HEADROOM,
        max_queued_bytes=min(MAX_BYTES, limits.max_total_gather_bytes),
        writes=guard.writes if guard is not None else None,
    )
    barriers = BarrierServicer(driver)
    stores = StoreServicer(driver)
    server.add_generic_rpc_handlers((sessions.handler(),))
    barrier_pb2_grpc.add_BarrierServiceServicer_to_server(barriers, server)
    rendezvous = RendezvousServicer(driver, replicas=addresses, keepalive_ms=keepalive_ms)
    rendezvous_pb2_grpc.add_RendezvousServiceServicer_to_server(rendezvous, server)
    local = LocalCheckpointServicer(driver, replicas=addresses, keepalive_ms=keepalive_ms)
    local_pb2_grpc.add_LocalCheckpointServiceServicer_to_server(local, server)
    run_pb2_grpc.add_RunServiceServicer_to_server(RunServicer(driver, snapshots or Snapshots()), server)
    insight_pb2_grpc.add_InsightServiceServicer_to_server(InsightServicer(driver, inspector), server)
    store_pb2_grpc.add_StoreServiceServicer_to_server(stores, server)
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(
        CoordinatorServicer(driver, replicas), server
    )
    names = [service.full_name for service in SERVICES]
    checks = HealthServicer(names)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection([*names, HEALTH.full_name, reflection.SERVICE_NAME], server)
    return RpcServer(server, checks, sessions, barriers, rendezvous, stores, local)
