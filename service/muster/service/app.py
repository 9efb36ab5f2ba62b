"""The life of one coordinator: open the state, serve, drain, close."""

import asyncio
import resource
import signal
from typing import Any

import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from muster.service.address import Address
from muster.service.clock import SystemClock
from muster.service.config import Config
from muster.service.driver import Driver
from muster.service.rpc.codec import encode_session_message
from muster.service.rpc.guard import GuardInterceptor
from muster.service.rpc.server import METHODS, MOST_CONNECTIONS, RpcServer, build_server
from muster.service.security.config import Security, TrafficLimits
from muster.service.security.files import FileError
from muster.service.security.gate import Gate
from muster.service.storage.engine import StorageError
from muster.service.storage.location import engine_for
from muster.service.telemetry.logs import EventLog
from muster.service.telemetry.metrics import Metrics, Scrape, StateCollector
from muster.service.telemetry.observers import Observers
from muster.service.version import VERSION
from muster.service.web.access import guarded
from muster.service.web.connections import SILENCE_TIMEOUT, BoundedSite
from muster.service.web.site import build_site

RESERVED_FILES = 1_500
"""Open files that gRPC's connections leave to the state, the HTTP port and the interpreter."""


class StartError(Exception):
    """The coordinator cannot start. The message says what, why, and what to do next."""


async def serve(config: Config) -> None:
    """Run a coordinator until SIGTERM or SIGINT.

    Raises:
        StartError: a port cannot be bound, or a certificate or the tokens file cannot be used.
        StorageError: the state cannot be opened, read or written.
    """
    log = structlog.get_logger()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gate = _open_gate(config.security)
    metrics = Metrics()
    clock = SystemClock()
    driver = Driver(
        engine_for(config.state),
        clock=clock,
        observer=Observers(EventLog(), metrics),
        encode=encode_session_message,
        session_ttl=config.session_ttl,
        limits=config.limits,
        retention=config.retention,
    )
    try:
        metrics.began(driver.coordinator.epoch, clock.now().wall)
        metrics.commit_open.set_function(driver.commit_age)
        state = StateCollector(driver.coordinator, metrics, clock)
        for method, kind in METHODS.items():
            metrics.expect(kind, method)
        if gate.tls is not None:
            metrics.show_certificate_expiry(gate.tls)
        rpc = build_server(
            driver,
            session_ttl=config.session_ttl,
            limits=config.limits,
            observer=metrics,
            guard=_guard(config.security, gate),
            max_connections=_connections(),
        )
        application = build_site(
            lambda: Scrape(state, metrics.registry), lambda: _why_not_ready(driver, stop), driver
        )
        application.middlewares.append(_http_guard(config.security, gate))
        site = web.AppRunner(
            application, access_log=None, handle_signals=False, keepalive_timeout=SILENCE_TIMEOUT
        )
        freshness = asyncio.create_task(gate.keep_fresh())
        try:
            port = await _start_rpc(rpc, config.listen, gate)
            http = await _start_site(site, config, gate)
            _warn_if_open(config)
            log.info(
                "serving",
                grpc=str(Address(config.listen.host, port)),
                http=str(http),
                state=config.state,
                epoch=driver.coordinator.epoch,
                version=VERSION,
            )
            await _until_stopped(stop, driver, freshness)
            log.info("draining", sessions=len(rpc.sessions.sessions))
        finally:
            freshness.cancel()
            driver.freeze()
            await rpc.drain(config.drain_grace if stop.is_set() else 0)
            await site.cleanup()
    except StorageError:
        metrics.storage_errors.inc()
        raise
    finally:
        await driver.close()
    log.info("stopped")


async def _until_stopped(stop: asyncio.Event, driver: Driver, freshness: asyncio.Task[None]) -> None:
    """Wait for a signal, or raise what stopped the driver, or the look at the files that never ends."""
    stopped = asyncio.ensure_future(stop.wait())
    waits: set[asyncio.Future[Any]] = {stopped, driver.failed, freshness}
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    for ended in (driver.failed, freshness):
        if ended.done():
            ended.result()


def _why_not_ready(driver: Driver, stop: asyncio.Event) -> str | None:
    if driver.failed.done():
        return "the state cannot be written"
    return "draining" if stop.is_set() else None


def _open_gate(security: Security) -> Gate:
    try:
        return Gate(security)
    except FileError as error:
        raise StartError(str(error)) from error


def _guard(security: Security, gate: Gate) -> GuardInterceptor | None:
    if gate.access is None and security.traffic == TrafficLimits():
        return None
    return GuardInterceptor(gate.access, gate.traffic)


def _http_guard(security: Security, gate: Gate) -> Middleware:
    return guarded(
        gate.access if security.http_tokens else None,
        needs_certificate=security.http_tls and security.knows_clients,
    )


def _connections() -> int:
    """How many gRPC may hold open, with as many open files as the system lets us have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return min(MOST_CONNECTIONS, max(most // 2, most - RESERVED_FILES))


async def _start_rpc(rpc: RpcServer, address: Address, gate: Gate) -> int:
    try:
        if gate.tls is not None:
            port = rpc.server.add_secure_port(str(address), gate.tls.grpc_credentials())
        else:
            port = rpc.server.add_insecure_port(str(address))
    except RuntimeError as error:
        raise StartError(_cannot_bind("--listen", address, str(error))) from error
    await rpc.server.start()
    return int(port)


async def _start_site(runner: web.AppRunner, config: Config, gate: Gate) -> Address:
    await runner.setup()
    address = config.http
    context = gate.tls.http_context() if gate.tls is not None and config.security.http_tls else None
    try:
        await BoundedSite(runner, address.host, address.port, context).start()
    except OSError as error:
        raise StartError(_cannot_bind("--http", address, error.strerror or str(error))) from error
    return Address(address.host, runner.addresses[0][1])


def _cannot_bind(flag: str, address: Address, why: str) -> str:
    return (
        f"cannot listen on {address}: {why}. Another program may hold the port (see: ss -ltnp "
        f"'sport = :{address.port}'); stop it, or give {flag} another address."
    )


def _warn_if_open(config: Config) -> None:
    security = config.security
    has_tokens = security.tokens_file is not None
    http_knows_clients = security.http_tokens or (security.http_tls and security.knows_clients)
    ports = (
        (
            ("--listen", config.listen, "release, abort and read barriers"),
            (security.tls is not None, "--tls-cert and --tls-key"),
            (has_tokens or security.knows_clients, "--tokens-file or --tls-client-ca"),
        ),
        (
            ("--http", config.http, "see the runs and the metrics"),
            (security.http_tls, "--http-tls"),
            (http_knows_clients, "--http-tokens"),
        ),
    )
    for (flag, address, use), (has_tls, tls_flags), (has_callers, caller_flags) in ports:
        if address.is_loopback:
            continue
        where = f"{flag} {address} is reachable from other machines, and"
        if not has_tls:
            structlog.get_logger().warning(
                "open.port",
                reason=f"{where} without TLS whoever is on the way can read and change what is said. Give "
                f"{tls_flags}, or keep it in a trusted network.",
            )
        if not has_callers:
            structlog.get_logger().warning(
                "open.port",
                reason=f"{where} asks nobody who they are: whoever reaches it can {use}. Give "
                f"{caller_flags}, or keep it in a trusted network.",
            )
