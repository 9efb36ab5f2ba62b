"""By which names the HTTP port may be called: pages of other sites must not read it through a browser.

A page may give its own name the address of this port, by a DNS server of its own, and the browser then takes
this port for the page's site (DNS rebinding). The browser still sends the page's name, in ``Host``.
"""

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

LOCAL = "localhost"


def known_hosts(names: Collection[str], *, checks_unnamed: bool) -> Middleware:
    """The middleware that refuses requests for other hosts, and those that pages of other sites make.

    IP addresses and ``localhost`` are always known: no DNS server decides what they mean.

    Args:
        names: the other names by which this port may be called.
        checks_unnamed: whether other hosts are refused even though no names are given.
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
    """The host in a URL, without its port; empty if there is none."""
    try:
        return _plain(urlsplit(url).hostname or "")
    except ValueError:
        return ""


def _plain(name: str) -> str:
    return name.lower().rstrip(".")
