"""The HTTP port: the status page, /metrics, /healthz and /readyz."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from muster.service.replica_list import Replicas, no_replicas
from muster.service.snapshots import Snapshots
from muster.service.web.response_cache import CachedResponse, ResponseCache, rendered, response
from muster.service.web.stacks import Ask
from muster.service.web.status import State, add_status

OPENMETRICS = "application/openmetrics-text"


def build_site(
    scrape: Callable[[], Collector],
    ready: Callable[[], str | None],
    state: State,
    ask: Ask,
    replicas: Replicas = no_replicas,
    snapshots: Snapshots | None = None,
) -> web.Application:
    """Assemble the HTTP application of a coordinator.

    Args:
        scrape: reads the metrics on the loop; a thread collects and encodes them.
        ready: says why the coordinator does not serve now; None if it does.
        state: gives the data of the status page.
        ask: asks processes for their stacks.
        replicas: lists all coordinators of this state, if there can be several.
        snapshots: views of runs, shared with RPC; None: the site makes its own.
    """
    site = web.Application()
    add_probes(site, scrape, ready)
    add_status(site, state, ask, snapshots or Snapshots(), replicas)
    return site


def add_probes(
    site: web.Application, scrape: Callable[[], Collector], ready: Callable[[], str | None], well: str = "ok"
) -> None:
    """Add metrics and health to a site.

    Args:
        site: the site.
        scrape: see :func:`build_site`.
        ready: see :func:`build_site`.
        well: what /readyz answers when the coordinator is ready.
    """
    answers = ResponseCache()

    async def metrics(request: web.Request) -> web.Response:
        # The version that a client names is ignored: each version would need a cached response of its own.
        asked = OPENMETRICS if OPENMETRICS in request.headers.get("Accept", "") else ""
        encode, content_type = choose_encoder(asked)

        async def make() -> CachedResponse:
            taken = scrape()
            return await rendered(lambda: encode(taken), content_type)

        return response(request, await answers.get(content_type, make))

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        why_not = ready()
        if why_not is None:
            return web.Response(text=f"{well}\n")
        return web.Response(status=503, text=f"not ready: {why_not}\n")

    site.router.add_get("/metrics", metrics)
    site.router.add_get("/healthz", healthz)
    site.router.add_get("/readyz", readyz)
