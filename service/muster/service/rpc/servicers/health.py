"""The health service grpc.health.v1, for probes and clients."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.refusal import Refusal, limit_exceeded
from muster.service.draining import DRAINING
from muster.serving.connections import address_of
from muster.serving.counted import counted

MAX_WATCHERS = 1_000
"""Open watches. They need no token, so anyone could fill the memory with them."""
MAX_WATCHERS_PER_ADDRESS = 100
"""Open watches of one address, so that it leaves room for others."""


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the library has no types
    """Serves ``grpc.health.v1.Health``: every service is SERVING until the drain.

    The library's own servicer holds a lock while it writes to a watcher, and never ends a Watch. One client
    that does not read could delay a drain.

    Args:
        services: the full names of the served services, beside "" for the whole server.
        not_served: the full names of services that only a leader serves.
    """

    def __init__(self, services: Iterable[str], not_served: Iterable[str] = ()) -> None:
        self._not_served = frozenset(not_served)
        self._services = ("", *services, *self._not_served)
        self._draining = asyncio.Event()
        self._watchers: Counter[str] = Counter()
        """Open watches, by address."""

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        """Return whether a service is served."""
        if request.service not in self._services:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f'no service "{report.shown(request.service)}" is here. Ask for one of '
                f'{", ".join(self._services[1:])}, or with "" for the whole coordinator.',
            )
        return self._now(request.service)

    async def List(  # noqa: N802
        self, request: health_pb2.HealthListRequest, context: Any
    ) -> health_pb2.HealthListResponse:
        """Return the status of every service."""
        return health_pb2.HealthListResponse(
            statuses={service: self._now(service) for service in self._services}
        )

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """Send the status now and at the drain, and end."""
        address = address_of(context.peer())
        if self._watchers.total() >= MAX_WATCHERS:
            raise _too_many("all", "max_watchers", MAX_WATCHERS)
        if self._watchers[address] >= MAX_WATCHERS_PER_ADDRESS:
            raise _too_many(address, "max_watchers_per_address", MAX_WATCHERS_PER_ADDRESS)
        with counted(self._watchers, address):
            if request.service in self._services:
                yield self._now(request.service)
                await self._draining.wait()
                yield self._now(request.service)
            else:
                yield health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                await self._draining.wait()
        raise DRAINING

    def drain(self) -> None:
        """Tell every watcher that no service is served any more."""
        self._draining.set()

    def _now(self, service: str) -> health_pb2.HealthCheckResponse:
        status = health_pb2.HealthCheckResponse
        served = not self._draining.is_set() and service not in self._not_served
        return status(status=status.SERVING if served else status.NOT_SERVING)


def _too_many(of: str, limit: str, value: int) -> Refusal:
    given = f"{value:,} watches of {of} are open"
    return limit_exceeded(limit, value, given, "Ask with Check, or end others.")
