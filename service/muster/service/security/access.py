"""The table of roles for all methods, and the check of every call."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from google.protobuf.unknown_fields import UnknownFieldSet

from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.security.audit import CALL
from muster.service.security.claims import Claims
from muster.service.security.grants import Grant, Role
from muster.service.security.identity.refusals import UNKNOWN, TokenRefused, unknown
from muster.service.security.identity.verifier import Verifier
from muster.service.security.journal import JOURNAL
from muster.service.security.tokens import Tokens, bearer, digest_of

AUTHORIZATION = "authorization"
"""The metadata key, and the HTTP header, that carries the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The requirements of one method.

    The ``run_id`` and the ``node_name`` of the request, if it has them, are always checked.
    """

    role: Role
    shows: Literal["", "run", "runs", "barriers"] = ""
    """The field of the response that has entries of several runs. The caller sees only allowed ones."""
    holds: Literal["", "operation"] = ""
    """The oneof of the request whose message has the run id, if the request itself has none."""


VIEWS = Rule(role=Role.VIEWER)
WATCHES = Rule(role=Role.WATCHER, shows="runs")
WORKS = Rule(role=Role.WORKER)
OPERATES = Rule(role=Role.OPERATOR)

RULES: Mapping[str, Rule] = {
    "/muster.v1.CoordinatorService/Status": VIEWS,
    "/muster.v1.CoordinatorService/Replicas": VIEWS,
    "/muster.v1.RunService/List": Rule(role=Role.VIEWER, shows="runs"),
    "/muster.v1.RunService/Get": VIEWS,
    "/muster.v1.RunService/Members": VIEWS,
    "/muster.v1.RunService/Watch": Rule(role=Role.VIEWER, shows="run"),
    "/muster.v1.BarrierService/Get": VIEWS,
    "/muster.v1.BarrierService/List": Rule(role=Role.VIEWER, shows="barriers"),
    "/muster.v1.RendezvousService/Get": VIEWS,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": VIEWS,
    # It asks only runs that the caller may touch, and only for a node that the caller may drain.
    "/muster.v1.RunService/DrainNode": WATCHES,
    "/muster.v1.SessionService/Connect": WORKS,
    "/muster.v1.BarrierService/Arrive": WORKS,
    "/muster.v1.BarrierService/Abort": WORKS,
    "/muster.v1.RendezvousService/Join": WORKS,
    "/muster.v1.RendezvousService/Leave": WORKS,
    "/muster.v1.RendezvousService/Close": WORKS,
    "/muster.v1.StoreService/Set": WORKS,
    "/muster.v1.StoreService/Get": WORKS,
    "/muster.v1.StoreService/Wait": WORKS,
    "/muster.v1.StoreService/Check": WORKS,
    "/muster.v1.StoreService/Add": WORKS,
    "/muster.v1.StoreService/CompareSet": WORKS,
    "/muster.v1.StoreService/Append": WORKS,
    "/muster.v1.StoreService/Delete": WORKS,
    "/muster.v1.StoreService/DeletePrefix": WORKS,
    "/muster.v1.StoreService/ListKeys": WORKS,
    "/muster.v1.StoreService/NumKeys": WORKS,
    "/muster.v1.StoreService/Operate": Rule(role=Role.WORKER, holds="operation"),
    "/muster.v1.LocalCheckpointService/Keep": WORKS,
    "/muster.v1.LocalCheckpointService/Report": WORKS,
    "/muster.v1.LocalCheckpointService/Commit": WORKS,
    "/muster.v1.LocalCheckpointService/Permit": WORKS,
    "/muster.v1.LocalCheckpointService/Recover": WORKS,
    "/muster.v1.LocalCheckpointService/List": VIEWS,
    "/muster.v1.InsightService/Stacks": OPERATES,
    # A rank that must end asks all ranks to save. Only an operator may withdraw such a request.
    "/muster.v1.RunService/RequestSave": WORKS,
    "/muster.v1.RunService/CancelSave": OPERATES,
    "/muster.v1.RunService/Evict": OPERATES,
    "/muster.v1.RunService/Forget": OPERATES,
    "/muster.v1.RendezvousService/EvictNode": OPERATES,
}
"""The rule of each method. A method that is not in the table needs an operator."""

READS = frozenset(
    {f"/muster.v1.StoreService/{name}" for name in ("Get", "Wait", "Check", "ListKeys", "NumKeys")}
    | {"/muster.v1.InsightService/Stacks"}
)
"""Methods that need more than a viewer, and change nothing."""


def changes(method: str) -> bool:
    """Return whether a method changes something, or is not in the table."""
    return (
        method not in OPEN_METHODS and method not in READS and RULES.get(method, OPERATES).role > Role.VIEWER
    )


OPEN_METHODS = frozenset({f"/grpc.health.v1.Health/{name}" for name in ("Check", "List", "Watch")})
"""Methods without a token, for probes."""


REVOKED = 0.0
"""The end of a call with a revoked token: in the past, so that it ends at once."""


class Access:
    """Checks callers by the current tokens, and ends calls whose token is revoked or has expired.

    Args:
        tokens: returns the current tokens.
        verifier: checks the tokens of issuers; None: the tokens file has no issuers.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        tokens: Callable[[], Tokens],
        verifier: Verifier | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tokens = tokens
        self._verifier = verifier
        self._clock = clock
        self._open: dict[Grant, set[asyncio.Timeout]] = {}

    async def admit(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Grant:
        """Return the grant of a caller, from the metadata of a call.

        Raises:
            Refusal: as :meth:`identify`, or ROLE_TOO_LOW.
        """
        values = (value for key, value in metadata if key == AUTHORIZATION)
        grant = await self.identify(next((value for value in values if isinstance(value, str)), ""))
        if (call := CALL.get()) is not None:
            call.grant = grant
        check_role(grant, RULES.get(method, OPERATES).role, method)
        return grant

    async def identify(self, authorization: str) -> Grant:
        """Return the grant of the token in an ``Authorization`` header.

        Only a token with an unknown key waits.

        Raises:
            Refusal: TOKEN_MISSING, TOKEN_UNKNOWN, TOKEN_EXPIRED or KEYS_UNAVAILABLE.
        """
        try:
            return await self._identified(authorization)
        except TokenRefused as refusal:
            JOURNAL.refused(refusal.reason, refusal.check, refusal.why, issuer=refusal.issuer)
            raise

    async def _identified(self, authorization: str) -> Grant:
        token = bearer(authorization)
        if token is None:
            raise TokenRefused(
                Reason.TOKEN_MISSING,
                "this coordinator asks for a token, and none came. Set MUSTER_TOKEN_FILE or MUSTER_TOKEN, "
                "or give --token-file.",
                check="missing",
            )
        tokens = self._tokens()
        grant = tokens.find(token)
        if grant is not None:
            return grant
        if self._verifier is None or not tokens.issuers:
            raise unknown("unknown", "it is not a token of the file")
        claims = await self._verifier.verify(token)
        # The tokens file may have changed while a key was fetched.
        tokens = self._tokens()
        grant = tokens.of(claims, digest_of(token))
        if grant is None:
            raise _nobody(claims) if tokens.rule_of(claims) is None else _without_node(claims)
        return grant

    @asynccontextmanager
    async def while_granted(self, grant: Grant) -> AsyncIterator[asyncio.Timeout]:
        """Run a call while its token is valid.

        Yields:
            What expires when the token is no longer valid.

        Raises:
            Refusal: TOKEN_UNKNOWN: the token was revoked meanwhile; or TOKEN_EXPIRED.
        """
        open_calls = self._open.setdefault(grant, set())
        try:
            async with asyncio.timeout_at(self._end_of(grant)) as scope:
                open_calls.add(scope)
                try:
                    yield scope
                finally:
                    open_calls.discard(scope)
                    if not open_calls:
                        self._open.pop(grant, None)
        except TimeoutError:
            if scope.expired():
                refusal = _ended(grant) if scope.when() != REVOKED else _revoked(grant)
                JOURNAL.ended(refusal.reason, refusal.check, refusal.why, issuer=refusal.issuer)
                raise refusal from None
            raise

    def _end_of(self, grant: Grant) -> float | None:
        """Return the latest end of a call, on the loop's clock."""
        if grant.claims is None:
            return None
        return asyncio.get_running_loop().time() + max(0.0, grant.claims.ends_at - self._clock())

    def revoke(self, tokens: Tokens) -> None:
        """End the calls of every grant that new tokens do not give unchanged."""
        for grant in [one for one in self._open if not tokens.is_still_valid(one)]:
            for scope in self._open[grant]:
                # A call that is already ending cannot be rescheduled.
                if not scope.expired():
                    scope.reschedule(REVOKED)


def check_role(grant: Grant, role: Role, what: str) -> None:
    """Check that a grant's role is high enough.

    Args:
        grant: the caller's grant.
        role: the required role.
        what: the method or path.

    Raises:
        Refusal: ROLE_TOO_LOW.
    """
    if grant.role < role:
        refusal = Refusal(
            Reason.ROLE_TOO_LOW,
            f'token "{grant.name}" has the role {grant.role.name.lower()}, and {what} needs '
            f"{role.name.lower()}. Use a token of that role.",
            role=grant.role.name.lower(),
            needed=role.name.lower(),
        )
        JOURNAL.refused(refusal.reason, "role", refusal.message)
        raise refusal


def check_run(grant: Grant, run_id: str) -> None:
    """Check that a grant is for a run.

    Raises:
        Refusal: RUN_NOT_ALLOWED.
    """
    if not grant.allows(run_id):
        which = f"run {report.shown(run_id)}" if run_id else "all runs"
        refusal = Refusal(
            Reason.RUN_NOT_ALLOWED,
            f'token "{grant.name}" is for the runs {", ".join(grant.runs)}, and not for {which}. Use a token '
            "for that run, or another run id.",
        )
        JOURNAL.refused(refusal.reason, "run", refusal.message)
        raise refusal


def check_node(grant: Grant, name: str) -> None:
    """Check that a grant is for a node.

    Raises:
        Refusal: NODE_NOT_ALLOWED.
    """
    if not grant.allows_node(name):
        which = f"node {report.shown(name)}" if name else "a node without a name"
        refusal = Refusal(
            Reason.NODE_NOT_ALLOWED,
            f'token "{grant.name}" is for the nodes {", ".join(grant.nodes)}, and not for {which}. Use a '
            "token for that node, or another node name.",
        )
        JOURNAL.refused(refusal.reason, "node", refusal.message)
        raise refusal


def check_request(grant: Grant, rule: Rule, request: Any) -> None:  # noqa: ANN401
    """Check that the caller may touch the run and the node of a request.

    Raises:
        Refusal: RUN_NOT_ALLOWED or NODE_NOT_ALLOWED; or INVALID_ARGUMENT: the run is unknown.
    """
    if rule.holds:
        held = request.WhichOneof(rule.holds)
        if not grant.allows_all and (held is None or len(UnknownFieldSet(request))):
            # A relay may be older than the coordinator to which it forwards this.
            raise Refusal(
                Reason.INVALID_ARGUMENT,
                f"an {rule.holds} came that this version does not know, so that the run that it is about is "
                "not known either. Use an SDK of this version.",
                field=rule.holds,
            )
        request = getattr(request, held) if held else None
    run_id = getattr(request, "run_id", None)
    # If a response can be filtered, an empty run id means all runs that the caller may see.
    if run_id is not None and not (run_id == "" and rule.shows):
        check_run(grant, run_id)
    node_name = getattr(request, "node_name", None)
    if node_name is not None:
        check_node(grant, node_name)


def filtered(grant: Grant, rule: Rule, response: Any) -> Any | None:  # noqa: ANN401
    """Remove runs that the caller may not see from a response; None: nothing is left."""
    if not rule.shows or grant.allows_all:
        return response
    shown = getattr(response, rule.shows)
    if rule.shows == "run":
        return response if grant.allows(shown.run_id) else None
    allowed = [one for one in shown if grant.allows(one.run_id)]
    del shown[:]
    shown.extend(allowed)
    return response


def _nobody(claims: Claims) -> TokenRefused:
    return TokenRefused(
        Reason.TOKEN_UNKNOWN,
        f"{claims.bearer} has no grant at this coordinator. Ask its operator for "
        "a [[service_account]] or [[login]] in the tokens file.",
        check="rules",
        issuer=claims.issuer,
    )


def _without_node(claims: Claims) -> TokenRefused:
    return TokenRefused(
        Reason.TOKEN_UNKNOWN,
        f"the token of {claims.bearer} names no node, and a watcher's must. Kubernetes names the node in the "
        "tokens of pods from version 1.30 on. Or ask the coordinator's operator for nodes in the "
        "[[service_account]].",
        check="node",
        issuer=claims.issuer,
    )


def _revoked(grant: Grant) -> TokenRefused:
    return TokenRefused(
        Reason.TOKEN_UNKNOWN,
        UNKNOWN,
        check="taken away",
        why=f"what the tokens file gave to {grant.name}, it gives no more",
        issuer=grant.claims.issuer if grant.claims is not None else "",
    )


def _ended(grant: Grant) -> TokenRefused:
    assert grant.claims is not None
    return TokenRefused(
        Reason.TOKEN_EXPIRED,
        f"the token of {grant.name} expired at {grant.claims.expiry}, and what was opened with "
        "it ends. Connect again with the one that has replaced it: the SDK does, and reads MUSTER_TOKEN_FILE "
        "again.",
        check="exp",
        issuer=grant.claims.issuer,
    )
