"""Access checks of the HTTP port: certificate, token, role and run."""

import base64
import binascii

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.security.access import Access, check_role, check_run
from muster.service.security.audit import MAX_TEXT, Write, identity
from muster.service.security.grants import Grant, Role
from muster.service.web import links
from muster.service.web.request_grant import GRANT
from muster.service.web.status import ASSETS, OVERVIEWS

PROBES = frozenset({"/healthz", "/readyz"})
"""Paths that need neither certificate nor token: probes have none."""
STATUSES = {
    Reason.TOKEN_MISSING: 401,
    Reason.TOKEN_UNKNOWN: 401,
    Reason.TOKEN_EXPIRED: 401,
    Reason.KEYS_UNAVAILABLE: 503,
}
"""HTTP status by reason, for refusals that another token or a later attempt can cure; others get 403."""


def guarded(
    access: Access | None, *, needs_certificate: bool, knows_operators: bool, audit: Write | None = None
) -> Middleware:
    """Return the middleware that checks each request.

    A path that names a run (``{run}`` in its route) needs a token for that run. The overviews show only the
    runs of the token, and the assets are the same for everyone: any token will do. Every other path shows all
    runs, and needs a token for all of them. Whole stacks (``{stacks}`` in the route) need an operator.

    Args:
        access: checks tokens; None: no token is needed.
        needs_certificate: whether a client must have shown a certificate in the TLS handshake.
        knows_operators: whether a caller that passes these checks counts as an operator, or has proved it.
        audit: writes an entry of the audit log; None: no audit log is kept.
    """

    def record(request: web.Request, result: str, why: str, grant: Grant | None = None) -> None:
        """Write a refused request to the audit log."""
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
                "stacks of processes are for operators, and this port does not identify its callers as the "
                "gRPC port does. Give --http-tls and --http-tokens, or use: muster stack"
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
    """Return the Authorization header. A browser sends the token as a password."""
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
