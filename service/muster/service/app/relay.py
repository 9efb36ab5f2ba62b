"""The life of a relay that is a process of its own: listen, pass on, drain."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

import structlog
from aiohttp import web
from google.protobuf.message_factory import GetMessageClass

from muster.relay.counts import Counts
from muster.relay.door import Metadata, Read, Visitor
from muster.relay.listening import Listen, ListenError
from muster.relay.passing import DIALOGUES
from muster.relay.refusals import Refused
from muster.relay.running import RelayConfig, start
from muster.service.address import Address
from muster.service.app.ports import (
    StartError,
    check_exposed,
    most_connections,
    open_gate,
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
"""What each method is asked with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """What ``muster relay`` was told."""

    listen: Listen
    upstream: str
    http: Address | None
    patience: float
    """Seconds."""
    socket_mode: int
    insecure: bool
    """Whether it may listen to other machines without TLS, or without asking who they are."""
    max_message_bytes: int
    """Of one message of a worker."""
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
    # Of a socket, its permissions say who may connect.
    if settings.listen.path is None:
        check_exposed(
            Address.parse(settings.listen.address),
            settings.security,
            insecure=settings.insecure,
            use="whoever reaches it, or is on the way, could speak for every rank, with its own token",
        )
    gate = open_gate(settings.security)
    counts = Counts()
    config = RelayConfig(
        listen=settings.listen,
        upstream=settings.upstream,
        version=VERSION,
        patience=settings.patience,
        socket_mode=settings.socket_mode,
        tls=gate.tls.grpc_credentials() if gate.tls is not None else None,
        door=GuardDoor(gate.access, gate.traffic),
        max_connections=most_connections(),
        max_message_bytes=settings.max_message_bytes,
    )
    try:
        served = await start(config, counts)
    except (ListenError, RuntimeError, OSError) as error:
        raise StartError(str(error)) from error
    fresh = asyncio.create_task(gate.keep_fresh())
    site = None
    log = structlog.get_logger()
    try:
        if settings.http is not None:
            site = open_site_runner(_site(counts, stop))
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


def _site(counts: Counts, stop: asyncio.Event) -> web.Application:
    metrics = RelayMetrics(counts)
    site = web.Application()
    # Without the coordinator it is ready all the same: it says so, and its workers find their way.
    add_probes(site, lambda: metrics.registry, lambda: "draining" if stop.is_set() else None, "ok: relaying")
    return site


class GuardDoor:
    """Asks for a token and holds the rates, as the coordinator does.

    What is passed on bears the relay's token and not the caller's, so nothing is that a worker's does not
    allow.

    Args:
        access: checks tokens; None: none are asked for.
        traffic: the bounds of peers.
    """

    def __init__(self, access: Access | None, traffic: Traffic) -> None:
        self._access = access
        self._traffic = traffic

    @asynccontextmanager
    async def admitted(self, method: str, metadata: Metadata, peer: str) -> AsyncIterator[Visitor]:
        """See ``Door``."""
        address = address_of(peer)
        with as_relays(), self._counted(method, address):
            async with self._granted(method, metadata) as grant:
                yield Caller(grant, self._traffic, address)

    @contextmanager
    def _counted(self, method: str, address: str) -> Iterator[None]:
        """Count a stream; what is not known here, the coordinator refuses."""
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
class Caller:
    """Somebody who was let in."""

    grant: Grant | None
    """None: no token was asked for."""
    traffic: Traffic
    address: str

    def check_run(self, run_id: str) -> None:
        """See ``Visitor``."""
        if self.grant is not None:
            with as_relays():
                access.check_run(self.grant, run_id)

    def check_request(self, method: str, data: bytes) -> None:
        """See ``Visitor``."""
        if self.grant is None:
            return
        rule = access.RULES.get(method, access.OPERATES)
        with as_relays():
            # What shows things of several runs would show those that the relay's own token may see.
            if rule.role > Role.WORKER or rule.shows:
                raise Refusal(
                    Reason.ROLE_TOO_LOW,
                    f"{method} is not for workers, and a relay passes on no other calls. Call the "
                    "coordinator.",
                )
            request = parsed(REQUESTS[method].FromString, data, method)
            access.check_request(self.grant, rule, request)

    def paced(self, read: Read) -> Read:
        """See ``Visitor``."""
        return self.traffic.paced(self.address, read)


@contextmanager
def as_relays() -> Iterator[None]:
    """Refusals of the coordinator's kind are raised as a relay's.

    Raises:
        Refused: what was refused.
    """
    try:
        yield
    except Refusal as refusal:
        raise Refused(codec.refusal_to_pb(refusal)) from refusal
