"""Who looks at a page."""

from aiohttp import web

from muster.service.security.grants import Grant

GRANT: web.RequestKey[Grant | None] = web.RequestKey("grant", Grant)
"""What the caller may do; None: everyone may see everything."""


def narrowed_to(request: web.Request) -> Grant | None:
    """The grant whose runs alone are to be shown; None if all are."""
    grant = request.get(GRANT)
    return None if grant is None or grant.allows_all else grant
