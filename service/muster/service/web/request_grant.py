"""What the caller of a page may see."""

from aiohttp import web

from muster.service.security.grants import Grant

GRANT: web.RequestKey[Grant | None] = web.RequestKey("grant", Grant)
"""What the caller may do; None if everyone may see everything."""


def restricting_grant(request: web.Request) -> Grant | None:
    """Return the grant that restricts which runs are shown; None if the caller may see all."""
    grant = request.get(GRANT)
    return None if grant is None or grant.allows_all else grant
