"""Who may see what on the HTTP port."""

import base64
import binascii

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.security.access import Access, check_role, check_run
from muster.service.security.audit import MAX_TEXT, Write, identity
from muster.service.security.grants import Grant, Role
from muster.service.web import links
from muster.service.web.status import ASSETS, OVERVIEWS
from muster.service.web.viewer import GRANT

PROBES = frozenset({"/healthz", "/readyz"})
"""Paths that need neither certificate nor token: probes have none."""
STATUSES = {
    Reason.TOKEN_MISSING: 401,
    Reason.TOKEN_UNKNOWN: 401,
    Reason.TOKEN_EXPIRED: 401,
    Reason.KEYS_UNAVAILABLE: 503,
}
"""Of the refusals that another token, or another attempt, would mend."""


def guarded(
    access: Access | None, *, needs_certificate: bool, knows_operators: bool, audit: Write | None = None
) -> Middleware:
    """The middleware that lets requests in.

    A path that names a run (``{run}`` in its route) needs a token for that run. The overviews show the runs
    that the token is for, and what the page is made of is the same for everyone: they need any token. Every
    other path shows all runs, and needs a token for all. Whole stacks (``{stacks}`` in the route) are for
    operators.

    Args:
        access: checks tokens; None: none are asked for.
        needs_certificate: whether a client must have shown a certificate in the TLS handshake.
        knows_operators: whether who passes these checks may do what an operator may, or shows that it is one.
        audit: takes the entries of the audit log; None: there is none.
    """

    def record(request: web.Request, result: str, why: str, grant: Grant | None = None) -> None:
        """Write to the audit log that a request was refused."""
        if audit is not None:
            audit(
                {
                    **identity(grant),
                    "from": request.remote or "",
                    "call": f"{request.method} {request.path}"[:MAX_TEXT],
                    "run": request.match_info.get("run", ""),
                    "result": result,
                    "message": why,
                }
            )

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[GRANT] = None
        if request.path in PROBES:
            return await handler(request)
        if needs_certificate and not request.get_extra_info("peercert"):
            why = "this port asks for a client certificate, and none came: curl --cert FILE --key FILE …"
            record(request, "CERTIFICATE_MISSING", why)
            return _refused(403, why)
        whole_stacks = links.STACKS in request.match_info
        if whole_stacks and not knows_operators:
            why = (
                "where processes stand is for operators, and this port does not ask who its callers are as "
                "the gRPC port does. Give --http-tls and --http-tokens, or use: muster stack"
            )
            record(request, "ROLE_TOO_LOW", why)
            return _refused(403, why)
        if access is not None:
            grant = None
            try:
                grant = await access.identify(_authorization(request))
                check_role(grant, Role.OPERATOR if whole_stacks else Role.VIEWER, request.path)
                if request.path not in ASSETS and request.path not in OVERVIEWS:
                    check_run(grant, request.match_info.get("run", ""))
            except Refusal as refusal:
                record(request, refusal.reason.name, refusal.message, grant)
                return _refused(STATUSES.get(refusal.reason, 403), refusal.message)
            request[GRANT] = grant
        return await handler(request)

    return guard


def _authorization(request: web.Request) -> str:
    """The header; a browser, which can only ask for a password, sends the token as that."""
    header = request.headers.get("Authorization", "")
    scheme, _, value = header.partition(" ")
    if scheme.lower() != "basic":
        return header
    try:
        password = base64.b64decode(value, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""
    return f"Bearer {password}"


def _refused(status: int, why: str) -> web.Response:
    headers = {"WWW-Authenticate": 'Bearer, Basic realm="muster: a token as the password"'}
    return web.Response(status=status, text=f"{why}\n", headers=headers if status == 401 else None)
