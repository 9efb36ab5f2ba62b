"""Checks the names by which clients call the HTTP port, so that pages of other sites cannot read it.

A hostile page can point its own DNS name at the address of this port. The browser then treats this port as
the page's own site (DNS rebinding). It still sends the page's name in ``Host``.
"""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

LOCAL = "localhost"


def known_hosts(names: Collection[str], *, checks_unnamed: bool) -> Middleware:
    """Return the middleware that refuses requests for other host names, and requests by pages of other sites.

    IP addresses and ``localhost`` are always allowed, because no DNS server decides what they mean.

    Args:
        names: the other host names that are allowed.
        checks_unnamed: whether to refuse other host names even if ``names`` is empty.
    """
    known = {_plain(name) for name in names}
    checks = bool(known) or checks_unnamed

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        host, origin = request.headers.get("Host"), request.headers.get("Origin")
        if checks and host is not None and not _is_known(_name(f"//{host}"), known):
            return web.Response(
                status=421,
                text="this port is not called by that name. Use its IP address or localhost, or give the "
                "name to --http-hosts.\n",
            )
        if origin is not None and not _is_same_site(origin, host or ""):
            return web.Response(status=403, text="pages of other sites may not ask this port for anything.\n")
        return await handler(request)

    return check


def _is_known(name: str, known: Collection[str]) -> bool:
    if name in known or name == LOCAL or name.endswith(f".{LOCAL}"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_same_site(origin: str, host: str) -> bool:
    return origin.partition("://")[2].lower() == host.lower() != ""


def _name(url: str) -> str:
    """Return the host in a URL, without its port; empty if the URL has no host."""
    try:
        return _plain(urlsplit(url).hostname or "")
    except ValueError:
        return ""


def _plain(name: str) -> str:
    return name.lower().rstrip(".")
