"""The life of one coordinator: open the state, serve, drain, close."""

import asyncio
import ipaddress
import signal
from dataclasses import dataclass, field
from typing import Any

import structlog
from aiohttp import web

from muster.service.address import Address
from muster.service.clock import SystemClock
from muster.service.core.limits import Limits
from muster.service.driver import Driver
from muster.service.rpc.codec import encode_session_message
from muster.service.rpc.server import METHODS, RpcServer, build_server
from muster.service.storage.engine import StorageError
from muster.service.storage.location import engine_for
from muster.service.telemetry.logs import EventLog
from muster.service.telemetry.metrics import Metrics, StateCollector
from muster.service.telemetry.observers import Observers
from muster.service.version import VERSION
from muster.service.web.site import build_site


class StartError(Exception):
    """The coordinator cannot start. The message says what, why, and what to do next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that ``muster serve`` may be told."""

    listen: Address
    http: Address
    state: str
    session_ttl: float = 10.0
    """Seconds that a lost session may take to come back."""
    drain_grace: float = 5.0
    """Seconds that calls in flight get when the coordinator stops."""
    limits: Limits = field(default_factory=Limits)


async def serve(config: Config) -> None:
    """Run a coordinator until SIGTERM or SIGINT.

    Raises:
        StartError: a port cannot be bound.
        StorageError: the state cannot be opened, read or written.
    """
    log = structlog.get_logger()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    metrics = Metrics()
    clock = SystemClock()
    driver = Driver(
        engine_for(config.state),
        clock=clock,
        observer=Observers(EventLog(), metrics),
        encode=encode_session_message,
        session_ttl=config.session_ttl,
        limits=config.limits,
    )
    try:
        metrics.began(driver.coordinator.epoch, clock.now().wall)
        metrics.commit_open.set_function(driver.commit_age)
        metrics.registry.register(StateCollector(driver.coordinator, metrics, clock))
        for method in METHODS:
            metrics.expect(_kind(method), method)
        rpc = await build_server(
            driver, session_ttl=config.session_ttl, limits=config.limits, observer=metrics
        )
        site = web.AppRunner(
            build_site(metrics.registry, lambda: _why_not_ready(driver, stop), driver),
            access_log=None,
            handle_signals=False,
        )
        try:
            port = await _start_rpc(rpc, config.listen)
            http = await _start_site(site, config.http)
            _warn_if_open(config)
            log.info(
                "serving",
                grpc=str(Address(config.listen.host, port)),
                http=str(http),
                state=config.state,
                epoch=driver.coordinator.epoch,
                version=VERSION,
            )
            await _until_stopped(stop, driver)
            log.info("draining", sessions=len(rpc.sessions.sessions))
        finally:
            driver.freeze()
            await rpc.drain(config.drain_grace if stop.is_set() else 0)
            await site.cleanup()
    except StorageError:
        metrics.storage_errors.inc()
        raise
    finally:
        await driver.close()
    log.info("stopped")


async def _until_stopped(stop: asyncio.Event, driver: Driver) -> None:
    """Wait for a signal, or raise what stopped the driver."""
    stopped = asyncio.ensure_future(stop.wait())
    waits: set[asyncio.Future[Any]] = {stopped, driver.failed}
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if driver.failed.done():
        driver.failed.result()


def _why_not_ready(driver: Driver, stop: asyncio.Event) -> str | None:
    if driver.failed.done():
        return "the state cannot be written"
    return "draining" if stop.is_set() else None


async def _start_rpc(rpc: RpcServer, address: Address) -> int:
    try:
        port = rpc.server.add_insecure_port(str(address))
    except RuntimeError as error:
        raise StartError(_cannot_bind("--listen", address, str(error))) from error
    await rpc.server.start()
    return int(port)


async def _start_site(runner: web.AppRunner, address: Address) -> Address:
    await runner.setup()
    try:
        await web.TCPSite(runner, address.host, address.port).start()
    except OSError as error:
        raise StartError(_cannot_bind("--http", address, error.strerror or str(error))) from error
    return Address(address.host, runner.addresses[0][1])


def _cannot_bind(flag: str, address: Address, why: str) -> str:
    return (
        f"cannot listen on {address}: {why}. Another program may hold the port (see: ss -ltnp "
        f"'sport = :{address.port}'); stop it, or give {flag} another address."
    )


def _warn_if_open(config: Config) -> None:
    for flag, address, use in (
        ("--listen", config.listen, "release, abort and read barriers"),
        ("--http", config.http, "read the metrics and the status page"),
    ):
        if not _is_loopback(address.host):
            structlog.get_logger().warning(
                "open.port",
                reason=f"{flag} {address} is reachable from other machines, without TLS or tokens: "
                f"whoever reaches it can {use}. Keep it in a trusted network.",
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _kind(method: str) -> str:
    if method.endswith("/Connect"):
        return "bidi_stream"
    return "server_stream" if method.endswith(("/Watch", "RendezvousService/Join")) else "unary"
