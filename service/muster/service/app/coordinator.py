"""The coordinator that decides: its state, its ports, its drain."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import structlog
from prometheus_client.registry import Collector

from muster.service.address import Address
from muster.service.app.ports import (
    most_connections,
    rpc_guard,
    site_runner,
    start_rpc,
    start_site,
    warn_if_open,
)
from muster.service.app.surroundings import Surroundings
from muster.service.core.vocabulary.effects import Kept
from muster.service.driver import Driver
from muster.service.insight.inspector import Inspector
from muster.service.replicas import Replicas, no_replicas
from muster.service.rpc.codec import encode_session_message
from muster.service.rpc.server import RpcServer, build_server
from muster.service.snapshots import Snapshots
from muster.service.storage import codec
from muster.service.storage.engine import Engine, LeadLostError, StorageError
from muster.service.telemetry.logs import EventLog
from muster.service.telemetry.metrics import Metrics
from muster.service.telemetry.observers import Observers
from muster.service.telemetry.state_collector import Scrape, StateCollector
from muster.service.version import VERSION
from muster.service.web.site import build_site


async def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a coordinator is among others; by itself, it is the only one."""

    replicas: Replicas = no_replicas
    """All that there are."""
    keepalive_ms: int = 0
    """How soon its clients are to notice that it does not answer; 0: by the session TTL."""
    about_to_serve: Callable[[], Awaitable[None]] = _nothing
    """Called when the state was read, and before the ports are bound."""
    serving: Callable[[], Awaitable[None]] = _nothing
    """Called when they are."""
    decode: Callable[[Iterable[tuple[bytes, bytes]]], Iterable[Kept]] = codec.decode_all
    """Makes records of the rows of the state."""
    retired: Callable[[], Awaitable[None]] = _nothing
    """Called when it decides nothing more, and tells nothing that it has not decided already."""
    deposed: asyncio.Future[None] | None = None
    """Ends with an exception when it may lead no longer."""


ALONE = Part()


async def run(around: Surroundings, engine: Engine, part: Part = ALONE) -> None:
    """Open the state and serve it, until told to stop.

    Raises:
        StartError: a port cannot be bound.
        StorageError: the state cannot be opened, read or written.
    """
    config, gate, metrics, stop = around.config, around.gate, around.metrics, around.stop
    log = structlog.get_logger()
    driver = Driver(
        engine,
        clock=around.clock,
        observer=Observers(EventLog(), metrics),
        encode=encode_session_message,
        session_ttl=config.session_ttl,
        limits=config.limits,
        retention=config.retention,
        decode=part.decode,
    )
    try:
        metrics.began(driver.coordinator.epoch, around.clock.now().wall)
        metrics.commit_open.set_function(driver.commit_age)
        state = StateCollector(driver.coordinator, metrics, around.clock)
        inspector = Inspector(driver)
        driver.look = inspector.look
        snapshots = Snapshots()
        rpc = build_server(
            driver,
            inspector,
            session_ttl=config.session_ttl,
            limits=config.limits,
            observer=metrics,
            guard=rpc_guard(config.security, gate),
            max_connections=most_connections(),
            replicas=part.replicas,
            keepalive_ms=part.keepalive_ms,
            snapshots=snapshots,
            audit=gate.audit,
        )
        application = build_site(
            lambda: _scrape(engine, state, metrics),
            lambda: _why_not_ready(driver, stop),
            driver,
            inspector.ask,
            part.replicas,
            snapshots,
        )
        site = site_runner(application, config, gate)
        freshness = asyncio.create_task(gate.keep_fresh())
        try:
            await part.about_to_serve()
            port = await start_rpc(rpc.server, config.listen, gate)
            http = await start_site(site, config, gate)
            await part.serving()
            driver.serve()
            warn_if_open(config)
            log.info(
                "serving",
                grpc=str(Address(config.listen.host, port)),
                http=str(http),
                state=config.state,
                epoch=driver.coordinator.epoch,
                version=VERSION,
            )
            await _until_stopped(stop, driver, freshness, part.deposed)
            log.info("draining", sessions=len(rpc.sessions.sessions))
        finally:
            freshness.cancel()
            await _end(driver, rpc, part, config.drain_grace if stop.is_set() else 0)
            await site.cleanup()
        if driver.failed.done():
            driver.failed.result()
    except StorageError:
        metrics.storage_errors.inc()
        raise
    finally:
        await driver.close()
    log.info("stopped")


async def _end(driver: Driver, rpc: RpcServer, part: Part, grace: float) -> None:
    """Decide nothing more, let another one lead, and ask everyone to connect to it.

    Args:
        driver: takes nothing more in.
        rpc: ends its calls.
        part: steps down.
        grace: seconds for what was taken in, and for calls in flight.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + grace
    driver.retire()
    settling = asyncio.ensure_future(driver.settled())
    ends: list[asyncio.Future[None]] = [settling, driver.failed]
    if part.deposed is not None:
        ends.append(part.deposed)
    # A commit may hang, and whoever waits here must hear that somebody else goes on.
    await asyncio.wait(ends, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
    settling.cancel()
    left = 0.0 if driver.failed.done() else max(0.0, until - loop.time())
    # Who is asked to connect again finds the next one the sooner.
    await asyncio.gather(part.retired(), rpc.drain(left))


def _scrape(engine: Engine, state: StateCollector, metrics: Metrics) -> Collector:
    """What /metrics shows: nothing of the state if another coordinator may lead."""
    try:
        engine.check_lead()
    except LeadLostError:
        return metrics.registry
    return Scrape(state, metrics.registry)


async def _until_stopped(
    stop: asyncio.Event,
    driver: Driver,
    freshness: asyncio.Task[None],
    deposed: asyncio.Future[None] | None,
) -> None:
    """Wait for a signal, or raise what ended the driver, the lead, or the look at the files."""
    stopped = asyncio.ensure_future(stop.wait())
    ends: list[asyncio.Future[Any]] = [driver.failed, freshness]
    if deposed is not None:
        ends.append(deposed)
    await asyncio.wait([stopped, *ends], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    for ended in ends:
        if ended.done():
            ended.result()


def _why_not_ready(driver: Driver, stop: asyncio.Event) -> str | None:
    if driver.failed.done():
        return "the state cannot be written"
    return "draining" if stop.is_set() else None
