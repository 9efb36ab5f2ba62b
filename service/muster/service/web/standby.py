"""The HTTP port of a replica that does not lead: a page that names the leader, metrics, health."""

import json
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry

from muster.service.leadership.replica import Replica
from muster.service.replica_list import Replicas
from muster.service.web import pages
from muster.service.web.site import add_probes
from muster.service.web.status import OVERVIEW, OVERVIEW_JSON, add_assets, add_headers


def build_standby_site(
    replica: Replica,
    replicas: Replicas,
    registry: Callable[[], CollectorRegistry],
    ready: Callable[[], str | None],
) -> web.Application:
    """Assemble the HTTP application.

    Args:
        replica: this replica.
        replicas: lists all replicas that this one knows.
        registry: gives the metrics.
        ready: says why the replica could not take over now; None if it could.
    """

    async def page(_: web.Request) -> web.Response:
        body = pages.standby_page(
            replica.record.address, replica.leader_elsewhere(), replicas(), ready() or ""
        )
        return web.Response(text=body, content_type="text/html", headers={"Cache-Control": "no-store"})

    async def json_view(_: web.Request) -> web.Response:
        fields = {
            "standby": replica.record.address,
            "leader": replica.leader_elsewhere() or None,
            "replicas": replica.addresses(),
            "trouble": ready(),
        }
        return web.Response(
            text=json.dumps(fields, indent=2) + "\n",
            content_type="application/json",
            headers={"Cache-Control": "no-store"},
        )

    site = web.Application()
    add_probes(site, registry, ready, "ok: standing by")
    site.router.add_get(OVERVIEW, page)
    site.router.add_get(OVERVIEW_JSON, json_view)
    add_assets(site)
    site.on_response_prepare.append(add_headers)
    return site
