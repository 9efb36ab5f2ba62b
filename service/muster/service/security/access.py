"""Who may call what, for which runs: the table of roles, and the check of every call."""

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
from muster.service.security.grants import Grant, Role
from muster.service.security.identity.refusals import UNKNOWN, TokenRefused, unknown
from muster.service.security.identity.verifier import Verifier
from muster.service.security.journal import JOURNAL
from muster.service.security.tokens import Tokens, bearer, digest_of

AUTHORIZATION = "authorization"
"""The metadata key, and the HTTP header, that carries the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What one method asks of its caller. The ``run_id`` of its request, if it has one, is always checked."""

    role: Role
    shows: Literal["", "run", "runs", "barriers"] = ""
    """The field of the response that holds things of several runs; of these only the allowed are shown."""
    holds: Literal["", "operation"] = ""
    """The oneof of the request that names the run, where it does not do so itself."""


VIEWS = Rule(role=Role.VIEWER)
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
    "/muster.v1.InsightService/Stacks": OPERATES,
    # A rank that is told to end asks for all; what a job must not lose, only an operator withdraws.
    "/muster.v1.RunService/RequestSave": WORKS,
    "/muster.v1.RunService/CancelSave": OPERATES,
    "/muster.v1.RunService/Evict": OPERATES,
    "/muster.v1.RunService/Forget": OPERATES,
}
"""By method. One that is not in the table is an operator's."""

READS = frozenset(
    {f"/muster.v1.StoreService/{name}" for name in ("Get", "Wait", "Check", "ListKeys", "NumKeys")}
    | {"/muster.v1.InsightService/Stacks"}
)
"""Methods above a viewer's that change nothing."""


def changes(method: str) -> bool:
    """Whether a method changes something. One that is not in the table counts as if it did."""
    return (
        method not in OPEN_METHODS and method not in READS and RULES.get(method, OPERATES).role > Role.VIEWER
    )


OPEN_METHODS = frozenset({f"/grpc.health.v1.Health/{name}" for name in ("Check", "List", "Watch")})
"""Methods that need no token: probes have none."""


TAKEN_AWAY = 0.0
"""When a call ends whose token is: in the past, so that it ends at once."""


class Access:
    """Checks callers against the tokens in force, and ends calls whose token is taken away or has expired.

    Args:
        tokens: gives those in force.
        verifier: checks the tokens of their issuers; None: there are none.
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
        """Who calls, from the metadata of a call.

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
        """Whose token an ``Authorization`` header holds. Only who shows one of an unknown key waits.

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
            raise unknown("unknown", "it is none of the tokens of the file")
        claims = await self._verifier.verify(token)
        # The file may have changed while a key was fetched.
        grant = self._tokens().of(claims, digest_of(token))
        if grant is None:
            raise TokenRefused(
                Reason.TOKEN_UNKNOWN,
                f"{claims.bearer} is nobody whom this coordinator lets in. Ask its operator for "
                "a [[service_account]] or [[login]] in the tokens file.",
                check="rules",
                issuer=claims.issuer,
            )
        return grant

    @asynccontextmanager
    async def while_granted(self, grant: Grant) -> AsyncIterator[None]:
        """Run a call for as long as its token is in force.

        Raises:
            Refusal: TOKEN_UNKNOWN, when the token was taken away meanwhile, or TOKEN_EXPIRED.
        """
        open_calls = self._open.setdefault(grant, set())
        try:
            async with asyncio.timeout_at(self._end_of(grant)) as scope:
                open_calls.add(scope)
                try:
                    yield
                finally:
                    open_calls.discard(scope)
                    if not open_calls:
                        self._open.pop(grant, None)
        except TimeoutError:
            if scope.expired():
                refusal = _ended(grant) if scope.when() != TAKEN_AWAY else _taken_away(grant)
                JOURNAL.ended(refusal.reason, refusal.check, refusal.why, issuer=refusal.issuer)
                raise refusal from None
            raise

    def _end_of(self, grant: Grant) -> float | None:
        """When a call ends at the latest, on the loop's clock."""
        if grant.claims is None:
            return None
        return asyncio.get_running_loop().time() + max(0.0, grant.claims.ends_at - self._clock())

    def revoke(self, tokens: Tokens) -> None:
        """End the calls of every grant that these tokens do not give as it was."""
        for grant in [one for one in self._open if not tokens.is_still_valid(one)]:
            for scope in self._open[grant]:
                # One that is ending already cannot be told again.
                if not scope.expired():
                    scope.reschedule(TAKEN_AWAY)


def check_role(grant: Grant, role: Role, what: str) -> None:
    """See that a grant's role is high enough.

    Args:
        grant: of the caller.
        role: the least that is needed.
        what: for which method or path.

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
    """See that a run is among those that a grant is for.

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


def check_request(grant: Grant, rule: Rule, request: Any) -> None:  # noqa: ANN401
    """See that a request is about a run that its caller may touch.

    Raises:
        Refusal: RUN_NOT_ALLOWED, or INVALID_ARGUMENT where the run is not known.
    """
    if rule.holds:
        held = request.WhichOneof(rule.holds)
        if not grant.allows_all and (held is None or len(UnknownFieldSet(request))):
            # A relay may be older than the coordinator to which it hands this on.
            raise Refusal(
                Reason.INVALID_ARGUMENT,
                f"an {rule.holds} came that this version does not know, so that the run that it is about is "
                "not known either. Use an SDK of this version.",
                field=rule.holds,
            )
        request = getattr(request, held) if held else None
    run_id = getattr(request, "run_id", None)
    # Where a response can be narrowed, no run id stands for all that the caller may see.
    if run_id is not None and not (run_id == "" and rule.shows):
        check_run(grant, run_id)


def narrowed(grant: Grant, rule: Rule, response: Any) -> Any | None:  # noqa: ANN401
    """A response without what its caller may not see; None if nothing is left of it."""
    if not rule.shows or grant.allows_all:
        return response
    shown = getattr(response, rule.shows)
    if rule.shows == "run":
        return response if grant.allows(shown.run_id) else None
    allowed = [one for one in shown if grant.allows(one.run_id)]
    del shown[:]
    shown.extend(allowed)
    return response


def _taken_away(grant: Grant) -> TokenRefused:
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
        "anew.",
        check="exp",
        issuer=grant.claims.issuer,
    )
