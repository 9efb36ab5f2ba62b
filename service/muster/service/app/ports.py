"""The two ports, and who is let in at each."""

import resource
import ssl
from collections.abc import Collection

import grpc
import structlog
from aiohttp import web
from aiohttp.typedefs import Middleware

from muster.service.address import Address
from muster.service.config import Config
from muster.service.rpc.interceptors.guard import GuardInterceptor
from muster.service.security.config import Security, TrafficLimits
from muster.service.security.files import FileError
from muster.service.security.gate import Gate
from muster.service.web.access import guarded
from muster.service.web.connections import SILENCE_TIMEOUT, BoundedSite
from muster.service.web.hosts import known_hosts
from muster.serving.options import MAX_CONNECTIONS

RESERVED_FILES = 1_500
"""Open files that gRPC's connections leave to the state, the HTTP port and the interpreter."""


class StartError(Exception):
    """The coordinator cannot start. The message says what, why, and what to do next."""


def open_gate(security: Security) -> Gate:
    """Who is let in.

    Raises:
        StartError: a certificate or the tokens file cannot be used.
    """
    try:
        return Gate(security)
    except FileError as error:
        raise StartError(str(error)) from error


def rpc_guard(security: Security, gate: Gate) -> GuardInterceptor | None:
    """What lets calls in; None if everyone may do everything."""
    if gate.access is None and gate.audit is None and security.traffic == TrafficLimits():
        return None
    return GuardInterceptor(gate.access, gate.traffic)


def _http_guard(security: Security, gate: Gate) -> Middleware:
    return guarded(
        gate.access if security.http_tokens else None,
        needs_certificate=security.http_tls and security.knows_clients,
        knows_operators=security.http_knows_operators,
        audit=gate.audit,
    )


def most_connections() -> int:
    """How many gRPC may hold open, with as many open files as the system lets us have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(most // 2, most - RESERVED_FILES))


async def start_rpc(server: grpc.aio.Server, address: Address, gate: Gate) -> int:
    """Serve gRPC.

    Returns:
        The port.

    Raises:
        StartError: it cannot be bound.
    """
    try:
        if gate.tls is not None:
            port = server.add_secure_port(str(address), gate.tls.grpc_credentials())
        else:
            port = server.add_insecure_port(str(address))
    except RuntimeError as error:
        raise StartError(_cannot_bind("--listen", address, str(error))) from error
    await server.start()
    return int(port)


def site_runner(application: web.Application, config: Config, gate: Gate) -> web.AppRunner:
    """What serves a site, behind its guard."""
    application.middlewares.append(_http_guard(config.security, gate))
    return open_site_runner(application)


def open_site_runner(application: web.Application) -> web.AppRunner:
    """What serves a site that is for everyone."""
    return web.AppRunner(
        application, access_log=None, handle_signals=False, keepalive_timeout=SILENCE_TIMEOUT
    )


async def start_site(runner: web.AppRunner, config: Config, gate: Gate) -> Address:
    """Serve HTTP, with TLS where it is asked for; as :func:`start_site_at`."""
    context = gate.tls.http_context() if gate.tls is not None and config.security.http_tls else None
    return await start_site_at(runner, config.http, context, config.security.http_hosts)


async def start_site_at(
    runner: web.AppRunner,
    address: Address,
    context: ssl.SSLContext | None = None,
    hosts: Collection[str] = (),
) -> Address:
    """Serve HTTP.

    Args:
        runner: serves the site; it has not been set up.
        address: where.
        context: for TLS.
        hosts: the names by which the port may be called, beside IP addresses and ``localhost``. Without any,
            other names are refused on loopback alone.

    Returns:
        Where.

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


def check_exposed(address: Address, security: Security, *, insecure: bool, use: str) -> None:
    """See that a port for workers is closed to strangers on other machines, or need not be.

    Args:
        address: where it listens.
        security: what guards it.
        insecure: whether it may be open to them.
        use: what a stranger could do there, for people.

    Raises:
        StartError: it is open.
    """
    lacking = [
        flags
        for flags, is_there in (
            ("--tls-cert and --tls-key", security.tls is not None),
            ("--tokens-file or --tls-client-ca", security.tokens_file is not None or security.knows_clients),
        )
        if not is_there
    ]
    if address.is_loopback or insecure or not lacking:
        return
    raise StartError(
        f"--listen {address} is reachable from other machines, without "
        f"{'TLS' if security.tls is None else 'asking who they are'}: {use}. Give "
        f"{' and '.join(lacking)}, listen on 127.0.0.1, or say --insecure in a trusted network."
    )


def warn_if_open(config: Config) -> None:
    """Say in the log what others may do that can reach the HTTP port."""
    security, address = config.security, config.http
    knows_clients = security.http_tokens or (security.http_tls and security.knows_clients)
    if address.is_loopback:
        return
    where = f"--http {address} is reachable from other machines, and"
    if not security.http_tls:
        structlog.get_logger().warning(
            "open.port",
            reason=f"{where} without TLS whoever is on the way can read and change what is said. Give "
            "--http-tls, or keep it in a trusted network.",
        )
    if not knows_clients:
        structlog.get_logger().warning(
            "open.port",
            reason=f"{where} asks nobody who they are: whoever reaches it can see the runs and the metrics. "
            "Give --http-tokens, or keep it in a trusted network.",
        )
