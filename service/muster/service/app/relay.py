"""A relay as a process of its own: listen, forward, drain."""

import asyncio
import signal
from contextlib import suppress
from dataclasses import dataclass

import structlog
from aiohttp import web

from muster.relay.listen_address import ListenAddress, ListenError
from muster.relay.server import RelayConfig, start
from muster.relay.stats import RelayStats
from muster.service.address import Address
from muster.service.app.ports import (
    StartError,
    check_rpc_exposed,
    keep_bounded,
    max_connections,
    open_security,
    open_site_runner,
    start_site_at,
)
from muster.service.app.relay_callers import RelayAuthenticator
from muster.service.security.config import Security
from muster.service.telemetry.relay_metrics import RelayMetrics
from muster.service.version import VERSION
from muster.service.web.site import add_probes


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """The settings of ``muster relay``."""

    listen: ListenAddress
    upstream: str
    http: Address | None
    fold_window: float
    """Seconds."""
    socket_mode: int
    insecure: bool
    """Whether it may listen to other machines without TLS, or without checking their tokens."""
    max_message_bytes: int
    """Limit of one message from a worker."""
    security: Security


async def run_relay(settings: RelaySettings) -> None:
    """Run a relay until SIGTERM or SIGINT.

    Raises:
        StartError: it cannot listen, or a certificate or the tokens file cannot be used.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # The permissions of a Unix socket decide which users may connect.
    if settings.listen.path is None:
        check_rpc_exposed(
            Address.parse(settings.listen.address),
            settings.security,
            insecure=settings.insecure,
            use="anyone who reaches it, or is on the way, could speak for every rank by its own token",
        )
    security = open_security(settings.security)
    stats = RelayStats()
    config = RelayConfig(
        listen=settings.listen,
        upstream=settings.upstream,
        version=VERSION,
        fold_window=settings.fold_window,
        socket_mode=settings.socket_mode,
        tls=security.tls.grpc_credentials() if security.tls is not None else None,
        authenticator=RelayAuthenticator(security.access, security.traffic, security.audit),
        max_connections=max_connections(),
        max_message_bytes=settings.max_message_bytes,
    )
    try:
        served = await start(config, stats)
    except (ListenError, RuntimeError, OSError) as error:
        raise StartError(str(error)) from error
    port = Address.parse(settings.listen.address).port if settings.listen.path is None else None
    fresh = asyncio.gather(security.keep_fresh(), keep_bounded(settings.security, port))
    site = None
    log = structlog.get_logger()
    try:
        if settings.http is not None:
            site = open_site_runner(_site(stats, stop))
            await start_site_at(site, settings.http)
        log.info("relaying", listen=settings.listen.address, upstream=settings.upstream, version=VERSION)
        await stop.wait()
        log.info("stopping: workers connect directly")
    finally:
        await served.stop()
        fresh.cancel()
        with suppress(asyncio.CancelledError):
            await fresh
        if site is not None:
            await site.cleanup()


def _site(stats: RelayStats, stop: asyncio.Event) -> web.Application:
    metrics = RelayMetrics(stats)
    site = web.Application()
    # A relay without a coordinator is ready as well: it tells its workers to connect directly.
    add_probes(site, lambda: metrics.registry, lambda: "draining" if stop.is_set() else None, "ok: relaying")
    return site
