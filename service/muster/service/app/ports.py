"""The two ports, and the checks of callers at each."""

import asyncio
import resource
import ssl
from collections.abc import Collection, Mapping

import grpc
import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from muster.service.address import Address
from muster.service.config import Config
from muster.service.rpc.interceptors.guard import GuardInterceptor
from muster.service.security.config import Security, TrafficLimits
from muster.service.security.context import SecurityContext
from muster.service.security.files import FileError
from muster.service.web.access import guarded
from muster.service.web.connections import SILENCE_TIMEOUT, BoundedSite
from muster.service.web.hosts import known_hosts
from muster.serving.connection_limit import ConnectionLimit
from muster.serving.heap import keep_heaps_trimmed
from muster.serving.options import MAX_CONNECTIONS

RESERVED_FILES = 1_500
"""Open files that gRPC's connections leave to the state, the HTTP port and the interpreter."""


class StartError(Exception):
    """The coordinator cannot start. The message says what, why, and what to do next."""


def open_security(settings: Security) -> SecurityContext:
    """Load certificates, tokens and rates.

    Raises:
        StartError: a certificate or the tokens file cannot be used.
    """
    try:
        return SecurityContext(settings)
    except FileError as error:
        raise StartError(str(error)) from error


def rpc_guard(settings: Security, security: SecurityContext) -> GuardInterceptor | None:
    """Return the interceptor that checks calls; None if everyone may do everything."""
    if security.access is None and security.audit is None and settings.traffic == TrafficLimits():
        return None
    return GuardInterceptor(security.access, security.traffic)


def _http_guard(settings: Security, security: SecurityContext) -> Middleware:
    return guarded(
        security.access if settings.http_tokens else None,
        needs_certificate=settings.http_tls and settings.knows_clients,
        knows_operators=settings.http_knows_operators,
        audit=security.audit,
    )


def max_connections() -> int:
    """Raise the limit of open files, and return how many connections gRPC may hold open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(most // 2, most - RESERVED_FILES))


async def keep_bounded(security: Security, port: int | None) -> None:
    """Keep the memory of freed messages and the connections of each address bounded, for ever.

    Args:
        security: has the limit.
        port: of gRPC; None: a Unix socket, whose peers have no addresses.
    """
    log, most = structlog.get_logger(), security.max_connections_per_peer

    def ended(address: str, count: int) -> None:
        log.warning("connections.limited", address=address, ended=count, limit=most)

    keeping = [keep_heaps_trimmed()]
    if port is not None and most:
        keeping.append(ConnectionLimit(port, most, ended).keep())
    await asyncio.gather(*keeping)


async def start_rpc(server: grpc.aio.Server, address: Address, security: SecurityContext) -> int:
    """Serve gRPC.

    Returns:
        The port.

    Raises:
        StartError: the port cannot be bound.
    """
    try:
        if security.tls is not None:
            port = server.add_secure_port(str(address), security.tls.grpc_credentials())
        else:
            port = server.add_insecure_port(str(address))
    except RuntimeError as error:
        raise StartError(_cannot_bind("--listen", address, str(error))) from error
    await server.start()
    return int(port)


def site_runner(application: web.Application, config: Config, security: SecurityContext) -> web.AppRunner:
    """Make the runner of a site behind its guard."""
    application.middlewares.append(_http_guard(config.security, security))
    return open_site_runner(application)


def open_site_runner(application: web.Application) -> web.AppRunner:
    """Make the runner of a site that is open to everyone."""
    return web.AppRunner(
        application, access_log=None, handle_signals=False, keepalive_timeout=SILENCE_TIMEOUT
    )


async def start_site(runner: web.AppRunner, config: Config, security: SecurityContext) -> Address:
    """Serve HTTP, with TLS if the settings ask for it; see :func:`start_site_at`."""
    context = security.tls.http_context() if security.tls is not None and config.security.http_tls else None
    return await start_site_at(runner, config.http, context, config.security.http_hosts)


async def start_site_at(
    runner: web.AppRunner,
    address: Address,
    context: ssl.SSLContext | None = None,
    hosts: Collection[str] = (),
) -> Address:
    """Serve HTTP.

    Args:
        runner: serves the site; it is not set up yet.
        address: the address to listen at.
        context: for TLS.
        hosts: the names by which the port may be called, beside IP addresses and ``localhost``. Without any,
            other names are refused on loopback alone.

    Returns:
        The address with the port that was bound.

    Raises:
        StartError: the port cannot be bound.
    """
    runner.app.middlewares.insert(0, known_hosts(hosts, checks_unnamed=address.is_loopback))
    await runner.setup()
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


def _check_exposed(
    flag: str, address: Address, guards: Mapping[str, bool], *, insecure: bool, use: str
) -> None:
    """Check that strangers on other machines cannot use a port. If the operator allows it, log a warning.

    Args:
        flag: the option that opens the port.
        address: the address at which the port listens.
        guards: the options that close the port to strangers, and whether each is given.
        insecure: whether the port may be open to strangers.
        use: what a stranger could do there, for people.

    Raises:
        StartError: the port is open to strangers.
    """
    lacking = [guard for guard, is_given in guards.items() if not is_given]
    if address.is_loopback or not lacking:
        return
    why = f"{flag} {address} is reachable from other machines without {' and without '.join(lacking)}: {use}"
    if insecure:
        structlog.get_logger().warning("open.port", reason=f"{why}.")
        return
    raise StartError(
        f"{why}. Give {'them' if len(lacking) > 1 else 'it'}, let {flag} have 127.0.0.1, or say --insecure "
        "in a trusted network."
    )


def check_rpc_exposed(address: Address, security: Security, *, insecure: bool, use: str) -> None:
    """Check that strangers cannot use a gRPC port, unless the operator allows it.

    Args:
        address: the address at which the port listens.
        security: the settings that guard the port.
        insecure: whether the port may be open to strangers.
        use: what a stranger could do there, for people.

    Raises:
        StartError: the port is open to strangers.
    """
    _check_exposed(
        "--listen",
        address,
        {
            "--tls-cert": security.tls is not None,
            "--tokens-file or --tls-client-ca": security.tokens_file is not None or security.knows_clients,
        },
        insecure=insecure,
        use=use,
    )


def check_coordinator_exposed(config: Config) -> None:
    """Check that strangers cannot use the ports of a coordinator, unless the operator allows it.

    Raises:
        StartError: a port is open to strangers.
    """
    security = config.security
    check_rpc_exposed(
        config.listen,
        security,
        insecure=config.insecure,
        use="anyone who reaches it, or is on the way, could release, abort and read barriers, or change keys",
    )
    _check_exposed(
        "--http",
        config.http,
        {
            "--http-tls": security.http_tls,
            "--http-tokens or --tls-client-ca": security.http_tokens or security.knows_clients,
        },
        insecure=config.insecure,
        use="anyone who reaches it, or is on the way, could see the runs and the metrics",
    )
