"""Admits the callers of a relay's port, and writes its audit log."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from muster.relay.authenticator import Caller, IncomingCall, Metadata, Read
from muster.relay.forwarding import DIALOGUES
from muster.relay.refusals import Refused, info_of
from muster.relay.upstream import CONNECT
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.rpc import codec
from muster.service.rpc.interceptors.refusals import parsed
from muster.service.rpc.server import METHODS, SERVICES
from muster.service.security import access
from muster.service.security.access import Access
from muster.service.security.audit import CALL, CANCELLED, OK, AuditedCall, Write, common_name
from muster.service.security.grants import Grant, Role
from muster.service.security.traffic import Traffic
from muster.serving.connections import address_of

REQUESTS = {
    f"/{service.full_name}/{method.name}": GetMessageClass(method.input_type)
    for service in SERVICES
    for method in service.methods
}
"""The request class of each method."""


class RelayAuthenticator:
    """Checks tokens and rates as the coordinator does.

    A forwarded call bears the relay's token and not the caller's. So the relay forwards only calls that a
    worker's token allows.

    Args:
        access: checks tokens; None: callers need no token.
        traffic: the limits of peers.
        audit: takes an entry for each call that is refused here, and for each forwarded one that changes
            something; None: no audit log.
    """

    def __init__(self, access: Access | None, traffic: Traffic, audit: Write | None = None) -> None:
        self._access = access
        self._traffic = traffic
        self._audit = audit

    @asynccontextmanager
    async def admit(self, method: str, call: IncomingCall) -> AsyncIterator[Caller]:
        """See ``Authenticator``."""
        address = address_of(call.peer())
        audited = self._audited(method, call)
        ending = nullcontext() if audited is None else with_end(audited)
        with ending, refusals_of_relay(), self._counted(method, address):
            async with self._granted(method, call.invocation_metadata() or ()) as grant:
                yield AdmittedCaller(grant, self._traffic, address, audited)

    def _audited(self, method: str, incoming: IncomingCall) -> AuditedCall | None:
        """Return the facts for the audit log about a call, and let the checks of the caller add to them."""
        if self._audit is None:
            return None
        # The coordinator's entries have the begin and the end of other streams.
        call = AuditedCall(
            self._audit,
            method,
            changes=access.changes(method),
            lasts=method == CONNECT,
            address=incoming.peer(),
            certificate=common_name(incoming.auth_context()),
        )
        CALL.set(call)
        return call

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
    audited: AuditedCall | None
    """None: no audit log."""

    def check_run(self, run_id: str) -> None:
        """See ``Caller``."""
        with refusals_of_relay():
            if self.grant is not None:
                access.check_run(self.grant, run_id)
        if self.audited is not None:
            self.audited.open(run_id)

    def check_request(self, method: str, data: bytes) -> None:
        """See ``Caller``."""
        if self.grant is not None:
            with refusals_of_relay():
                self._check_request(self.grant, method, data)
        elif self.audited is not None and method in REQUESTS:
            try:
                self.audited.ask(REQUESTS[method].FromString(data))
            except DecodeError:
                return  # The coordinator refuses it.
        if self.audited is not None:
            self.audited.forward()

    def _check_request(self, grant: Grant, method: str, data: bytes) -> None:
        rule = access.RULES.get(method, access.OPERATES)
        # A response about several runs would show all runs that the relay's own token may see.
        if rule.role > Role.WORKER or rule.shows:
            raise Refusal(
                Reason.ROLE_TOO_LOW,
                f"{method} is not for workers, and a relay passes on no other calls. Call the coordinator.",
            )
        access.check_request(grant, rule, parsed(REQUESTS[method].FromString, data, method))

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


@contextmanager
def with_end(audited: AuditedCall) -> Iterator[None]:
    """Write an entry for a refusal, by the relay or on a session by the coordinator, and for its end."""
    try:
        yield
    except Refused as refused:
        audited.refuse(info_of(refused.refusal).reason, refused.refusal.message)
        raise
    except BaseException:
        if audited.lasts:
            audited.end(CANCELLED)
        raise
    if audited.lasts:
        audited.end(OK)
