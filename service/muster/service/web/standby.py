"""The HTTP port of a replica that does not lead: a page that says who does, metrics, health."""

import json
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from muster.service.leadership.replica import Replica
from muster.service.web import pages
from muster.service.web.status import OVERVIEW, OVERVIEW_TWIN, Replicas, add_assets, add_headers


def build_standby_site(
    replica: Replica,
    replicas: Replicas,
    registry: Callable[[], CollectorRegistry],
    ready: Callable[[], str | None],
) -> web.Application:
    """Assemble the HTTP application.

    Args:
        replica: this one.
        replicas: all, as this one knows them.
        registry: what /metrics shows.
        ready: why the replica could not take over now, or None if it could.
    """

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry()), headers={"Content-Type": content_type})

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        why_not = ready()
        if why_not is None:
            return web.Response(text="ok: standing by\n")
        return web.Response(status=503, text=f"not ready: {why_not}\n")

    async def page(_: web.Request) -> web.Response:
        body = pages.standby_page(
            replica.record.address, replica.leader_elsewhere(), replicas(), ready() or ""
        )
        return web.Response(text=body, content_type="text/html", headers={"Cache-Control": "no-store"})

    async def twin(_: web.Request) -> web.Response:
        told = {
            "standby": replica.record.address,
            "leader": replica.leader_elsewhere() or None,
            "replicas": replica.addresses(),
            "trouble": ready(),
        }
        return web.Response(
            text=json.dumps(told, indent=2) + "\n",
            content_type="application/json",
            headers={"Cache-Control": "no-store"},
        )

    site = web.Application()
    site.router.add_get("/metrics", metrics)
    site.router.add_get("/healthz", healthz)
    site.router.add_get("/readyz", readyz)
    site.router.add_get(OVERVIEW, page)
    site.router.add_get(OVERVIEW_TWIN, twin)
    add_assets(site)

    site.on_response_prepare.append(add_headers)
    return site
