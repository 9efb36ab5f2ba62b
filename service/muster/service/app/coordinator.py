"""The coordinator that decides: its state, its ports, its drain."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import structlog
from prometheus_client.registry import Collector

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
from muster.service.core.vocabulary.records import StoredRecord
from muster.service.driver import Driver, Observer
from muster.service.insight.inspector import Inspector
from muster.service.replica_list import Replicas, no_replicas
from muster.service.rpc.codec import encode_session_message
from muster.service.rpc.server import RpcServer, build_server
from muster.service.snapshots import Snapshots
from muster.service.storage import codec
from muster.service.storage.engine import Engine, LeadLostError, StorageError
from muster.service.telemetry.logs import EventLog
from muster.service.telemetry.metrics import Metrics
from muster.service.telemetry.observers import Observers
from muster.service.telemetry.state_collector import Scrape, StateCollector
from muster.service.telemetry.traces import Traces
from muster.service.version import VERSION
from muster.service.web.site import build_site


async def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaHooks:
    """What a coordinator does as one of several replicas. The defaults are for a single one."""

    replicas: Replicas = no_replicas
    """Lists all replicas."""
    keepalive_ms: int = 0
    """Clients ping after so many milliseconds without data; 0: a third of the session TTL."""
    before_serving: Callable[[], Awaitable[None]] = _nothing
    """Called when the state is read, before the ports are bound."""
    on_serving: Callable[[], Awaitable[None]] = _nothing
    """Called when the ports are bound."""
    decode: Callable[[Iterable[tuple[bytes, bytes]]], Iterable[StoredRecord]] = codec.decode_all
    """Decodes the rows of the state."""
    on_retired: Callable[[], Awaitable[None]] = _nothing
    """Called when this coordinator decides nothing more, so that another replica may lead."""
    lead_lost: asyncio.Future[None] | None = None
    """Ends with an exception when this coordinator may no longer lead."""


STANDALONE = ReplicaHooks()


async def run(context: AppContext, engine: Engine, hooks: ReplicaHooks = STANDALONE) -> None:
    """Open the state and serve it until the process is told to stop.

    Raises:
        StartError: a port cannot be bound.
        StorageError: the state cannot be opened, read or written.
    """
    config, security, metrics, stop = context.config, context.security, context.metrics, context.stop
    log = structlog.get_logger()
    observers: list[Observer] = [EventLog(), metrics]
    traces = None if context.spans is None else Traces(context.spans, lambda: context.clock.now().wall)
    if traces is not None:
        observers.append(traces)
    began = context.clock.now().wall
    driver = Driver(
        engine,
        clock=context.clock,
        observer=Observers(*observers),
        encode=encode_session_message,
        session_ttl=config.session_ttl,
        reset_grace=config.reset_grace,
        limits=config.limits,
        retention=config.retention,
        decode=hooks.decode,
    )
    try:
        metrics.began(driver.coordinator.epoch, context.clock.now().wall)
        metrics.commit_open.set_function(driver.commit_age)
        state = StateCollector(driver.coordinator, metrics, context.clock)
        inspector = Inspector(driver)
        driver.probe = inspector.probe
        snapshots = Snapshots()
        rpc = build_server(
            driver,
            inspector,
            keepalive=config.keepalive,
            limits=config.limits,
            observer=metrics,
            guard=rpc_guard(config.security, security),
            max_connections=max_connections(),
            replicas=hooks.replicas,
            keepalive_ms=hooks.keepalive_ms,
            snapshots=snapshots,
            audit=security.audit,
        )
        application = build_site(
            lambda: _scrape(engine, state, metrics),
            lambda: _why_not_ready(driver, stop),
            driver,
            inspector.ask,
            hooks.replicas,
            snapshots,
        )
        site = site_runner(application, config, security)
        freshness = asyncio.create_task(security.keep_fresh())
        upkeep: asyncio.Task[None] | None = None
        try:
            await hooks.before_serving()
            state_read = context.clock.now().wall
            port = await start_rpc(rpc.server, config.listen, security)
            upkeep = asyncio.create_task(keep_bounded(config.security, port))
            http = await start_site(site, config, security)
            await hooks.on_serving()
            driver.serve()
            if traces is not None:
                traces.serving(driver.coordinator.epoch, began, state_read)
            log.info(
                "serving",
                grpc=str(Address(config.listen.host, port)),
                http=str(http),
                state=config.state,
                epoch=driver.coordinator.epoch,
                version=VERSION,
            )
            await _until_stopped(stop, driver, freshness, hooks.lead_lost)
            log.info("draining", sessions=len(rpc.sessions.sessions))
        finally:
            freshness.cancel()
            if upkeep is not None:
                upkeep.cancel()
            await _end(driver, rpc, hooks, config.drain_grace if stop.is_set() else 0)
            await site.cleanup()
        if driver.failed.done():
            driver.failed.result()
    except StorageError:
        metrics.storage_errors.inc()
        raise
    finally:
        await driver.close()
    log.info("stopped")


async def _end(driver: Driver, rpc: RpcServer, hooks: ReplicaHooks, grace: float) -> None:
    """Decide nothing more, let another replica lead, and ask all clients to connect to it.

    Args:
        driver: accepts no more events.
        rpc: ends its calls.
        hooks: its ``on_retired`` gives the lead up.
        grace: seconds for accepted events and calls in flight.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + grace
    driver.retire()
    draining = asyncio.ensure_future(driver.wait_drained())
    ends: list[asyncio.Future[None]] = [draining, driver.failed]
    if hooks.lead_lost is not None:
        ends.append(hooks.lead_lost)
    # A commit may hang. Its callers must still learn that they should connect elsewhere.
    await asyncio.wait(ends, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
    draining.cancel()
    left = 0.0 if driver.failed.done() else max(0.0, until - loop.time())
    # Both at once: a client that is asked to connect again then finds the next leader sooner.
    await asyncio.gather(hooks.on_retired(), rpc.drain(left))


def _scrape(engine: Engine, state: StateCollector, metrics: Metrics) -> Collector:
    """Return what /metrics shows: nothing of the state if another coordinator may lead."""
    try:
        engine.check_lead()
    except LeadLostError:
        return metrics.registry
    return Scrape(state, metrics.registry)


async def _until_stopped(
    stop: asyncio.Event,
    driver: Driver,
    freshness: asyncio.Task[None],
    lead_lost: asyncio.Future[None] | None,
) -> None:
    """Wait for a signal, or raise the error of the driver, the lease or the file watcher."""
    stopped = asyncio.ensure_future(stop.wait())
    ends: list[asyncio.Future[Any]] = [driver.failed, freshness]
    if lead_lost is not None:
        ends.append(lead_lost)
    await asyncio.wait([stopped, *ends], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    for ended in ends:
        if ended.done():
            ended.result()


def _why_not_ready(driver: Driver, stop: asyncio.Event) -> str | None:
    if driver.failed.done():
        return "the state cannot be written"
    return "draining" if stop.is_set() else None
