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
from muster.relay.door import Metadata, OpenDoor, Visitor
from muster.relay.listening import Listen, ListenError
from muster.relay.refusals import Refused
from muster.relay.running import RelayConfig, start
from muster.service.address import Address
from muster.service.app.ports import StartError, open_gate, open_site_runner, start_site_at
from muster.service.core.refusal import Reason, Refusal
from muster.service.rpc import codec
from muster.service.rpc.interceptor import parsed
from muster.service.rpc.server import SERVICES
from muster.service.security import access
from muster.service.security.access import Access
from muster.service.security.config import Security
from muster.service.security.grants import Grant, Role
from muster.service.telemetry.relay import RelayMetrics
from muster.service.version import VERSION
from muster.service.web.site import add_probes

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
    """Whether it may listen to other machines without asking who they are."""
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
    check_exposed(settings)
    gate = open_gate(settings.security)
    counts = Counts()
    config = RelayConfig(
        listen=settings.listen,
        upstream=settings.upstream,
        version=VERSION,
        patience=settings.patience,
        socket_mode=settings.socket_mode,
        tls=gate.tls.grpc_credentials() if gate.tls is not None else None,
        door=TokenDoor(gate.access) if gate.access is not None else OpenDoor(),
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


def check_exposed(settings: RelaySettings) -> None:
    """See that other machines are asked who they are, or need not be.

    Raises:
        StartError: they would not be.
    """
    security = settings.security
    asks = security.tokens_file is not None or security.knows_clients
    # Of a socket, its permissions say who may connect.
    listens_to_others = (
        settings.listen.path is None and not Address.parse(settings.listen.address).is_loopback
    )
    if listens_to_others and not asks and not settings.insecure:
        raise StartError(
            f"--listen {settings.listen.address} is reachable from other machines, and nobody would be "
            "asked who they are: whoever reaches it could speak for every rank, with this relay's own token. "
            "Give --tokens-file or --tls-client-ca, listen on a unix:// socket or 127.0.0.1, or say "
            "--insecure."
        )


def _site(counts: Counts, stop: asyncio.Event) -> web.Application:
    metrics = RelayMetrics(counts)
    site = web.Application()
    # Without the coordinator it is ready all the same: it says so, and its workers find their way.
    add_probes(site, lambda: metrics.registry, lambda: "draining" if stop.is_set() else None, "ok: relaying")
    return site


class TokenDoor:
    """Asks for a token, as the coordinator does.

    What is passed on bears the relay's token and not the caller's, so nothing is that a worker's does not
    allow.

    Args:
        access: checks tokens.
    """

    def __init__(self, access: Access) -> None:
        self._access = access

    @asynccontextmanager
    async def admitted(self, method: str, metadata: Metadata) -> AsyncIterator[Visitor]:
        """See ``Door``."""
        with as_relays():
            grant = await self._access.admit(method, metadata)
            async with self._access.while_granted(grant):
                yield Caller(grant)


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody with a token."""

    grant: Grant

    def check_run(self, run_id: str) -> None:
        """See ``Visitor``."""
        with as_relays():
            access.check_run(self.grant, run_id)

    def check_request(self, method: str, data: bytes) -> None:
        """See ``Visitor``."""
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
