"""A watcher as a process: watch, ask for saves, stop."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import structlog
from aiohttp import web

from muster.client.credentials import Credentials
from muster.service.address import Address
from muster.service.app.ports import StartError, open_site_runner, start_site_at
from muster.service.telemetry.watcher_log import WatcherLog
from muster.service.telemetry.watcher_metrics import WatcherMetrics
from muster.service.version import VERSION
from muster.service.web.site import add_probes
from muster.watcher.connection import Connection
from muster.watcher.drain import NodeDrain
from muster.watcher.source import SourceError
from muster.watcher.sources.registry import SourceOptions, open_source
from muster.watcher.stats import WatcherStats
from muster.watcher.watcher import Watcher


@dataclass(frozen=True, slots=True, kw_only=True)
class WatcherSettings:
    """The settings of ``muster watch``."""

    endpoint: str
    sources: Sequence[str]
    """Names of sources, each once."""
    options: SourceOptions
    credentials: Credentials
    """What the watcher shows the coordinator."""
    annotate: bool
    """Whether the last committed steps are written to the jobs' objects."""
    evictions: bool
    """Whether evictions by Kubernetes' EvictionRequest API wait for the saves."""
    http: Address | None


async def run_watcher(settings: WatcherSettings) -> None:
    """Run a watcher until SIGTERM or SIGINT.

    Raises:
        StartError: a source cannot work here, or the HTTP port cannot be bound.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    node_name = settings.options.node_name
    stats = WatcherStats()
    async with AsyncExitStack() as stack:
        connection = Connection(settings.endpoint, credentials=settings.credentials)
        stack.push_async_callback(connection.close)
        drain = NodeDrain(connection, node_name, f"watcher@{node_name}")
        options = replace(
            settings.options,
            annotate_by=connection if settings.annotate else None,
            respond_by=drain if settings.evictions else None,
        )
        try:
            sources = [await open_source(name, options, stack) for name in settings.sources]
        except SourceError as error:
            raise StartError(str(error)) from error
        watcher = Watcher(sources, drain, stats, WatcherLog())
        if settings.http is not None:
            site = open_site_runner(_site(stats, stop))
            stack.push_async_callback(site.cleanup)
            await start_site_at(site, settings.http)
        structlog.get_logger().info(
            "watching",
            node=node_name,
            sources=" ".join(settings.sources),
            endpoint=settings.endpoint,
            version=VERSION,
        )
        await _until(stop, watcher.run)


async def _until(stop: asyncio.Event, run: Callable[[], Awaitable[None]]) -> None:
    """Run until the event is set.

    Raises:
        StartError: a source cannot work here.
    """
    running = asyncio.ensure_future(run())
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    running.cancel()
    try:
        await running
    except asyncio.CancelledError:
        pass
    except SourceError as error:
        raise StartError(str(error)) from error


def _site(stats: WatcherStats, stop: asyncio.Event) -> web.Application:
    metrics = WatcherMetrics(stats)
    site = web.Application()

    def ready() -> str | None:
        silent = [source for source, at in stats.reported_at.items() if not at]
        if stop.is_set():
            return "stopping"
        return f"no answer yet of: {' '.join(silent)}" if silent else None

    add_probes(site, lambda: metrics.registry, ready, "ok: watching")
    return site
