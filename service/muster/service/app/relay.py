"""A relay as a process of its own: listen, forward, drain."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

import structlog
from aiohttp import web
from google.protobuf.message_factory import GetMessageClass

from muster.relay.authenticator import Caller, Metadata, Read
from muster.relay.forwarding import DIALOGUES
from muster.relay.listen_address import ListenAddress, ListenError
from muster.relay.refusals import Refused
from muster.relay.server import RelayConfig, start
from muster.relay.stats import RelayStats
from muster.service.address import Address
from muster.service.app.ports import (
    StartError,
    check_exposed,
    keep_bounded,
    max_connections,
    open_security,
    open_site_runner,
    start_site_at,
)
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.rpc import codec
from muster.service.rpc.interceptors.refusals import parsed
from muster.service.rpc.server import METHODS, SERVICES
from muster.service.security import access
from muster.service.security.access import Access
from muster.service.security.config import Security
from muster.service.security.grants import Grant, Role
from muster.service.security.traffic import Traffic
from muster.service.telemetry.relay_metrics import RelayMetrics
from muster.service.version import VERSION
from muster.service.web.site import add_probes
from muster.serving.connections import address_of

REQUESTS = {
    f"/{service.full_name}/{method.name}": GetMessageClass(method.input_type)
    for service in SERVICES
    for method in service.methods
}
"""The request class of each method."""


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
        check_exposed(
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
        authenticator=RelayAuthenticator(security.access, security.traffic),
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


class RelayAuthenticator:
    """Checks tokens and rates as the coordinator does.

    A forwarded call bears the relay's token and not the caller's. So the relay forwards only calls that a
    worker's token allows.

    Args:
        access: checks tokens; None: callers need no token.
        traffic: the limits of peers.
    """

    def __init__(self, access: Access | None, traffic: Traffic) -> None:
        self._access = access
        self._traffic = traffic

    @asynccontextmanager
    async def admit(self, method: str, metadata: Metadata, peer: str) -> AsyncIterator[Caller]:
        """See ``Authenticator``."""
        address = address_of(peer)
        with refusals_of_relay(), self._counted(method, address):
            async with self._granted(method, metadata) as grant:
                yield AdmittedCaller(grant, self._traffic, address)

    @contextmanager
    def _counted(self, method: str, address: str) -> Iterator[None]:
        """Count a stream. The coordinator refuses methods that this relay does not know."""
        if METHODS.get(method, "unary") == "unary":
            yield
            return
        with self._traffic.stream(address, "dialogue" if method in DIALOGUES else "session"):
            yield

    @asynccontextmanager
    async def _granted(self, method: str, metadata: Metadata) -> AsyncIterator[Grant | None]:
        if self._access is None:
            yield None
            return
        grant = await self._access.admit(method, metadata)
        async with self._access.while_granted(grant):
            yield grant


@dataclass(frozen=True, slots=True)
class AdmittedCaller:
    """A caller that was admitted."""

    grant: Grant | None
    """None: callers need no token."""
    traffic: Traffic
    address: str

    def check_run(self, run_id: str) -> None:
        """See ``Caller``."""
        if self.grant is not None:
            with refusals_of_relay():
                access.check_run(self.grant, run_id)

    def check_request(self, method: str, data: bytes) -> None:
        """See ``Caller``."""
        if self.grant is None:
            return
        rule = access.RULES.get(method, access.OPERATES)
        with refusals_of_relay():
            # A response about several runs would show all runs that the relay's own token may see.
            if rule.role > Role.WORKER or rule.shows:
                raise Refusal(
                    Reason.ROLE_TOO_LOW,
                    f"{method} is not for workers, and a relay passes on no other calls. Call the "
                    "coordinator.",
                )
            request = parsed(REQUESTS[method].FromString, data, method)
            access.check_request(self.grant, rule, request)

    def paced(self, read: Read) -> Read:
        """See ``Caller``."""
        return self.traffic.paced(self.address, read)


@contextmanager
def refusals_of_relay() -> Iterator[None]:
    """Turn a coordinator's refusal into a relay's.

    Raises:
        Refused: the refusal.
    """
    try:
        yield
    except Refusal as refusal:
        raise Refused(codec.refusal_to_pb(refusal)) from refusal
