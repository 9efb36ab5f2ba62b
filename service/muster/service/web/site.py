"""The HTTP port: the status page, /metrics, /healthz and /readyz."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from muster.service.replica_list import Replicas, no_replicas
from muster.service.snapshots import Snapshots
from muster.service.web.answers import Answer, Answers, rendered, response
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
        scrape: takes what /metrics shows, on the loop; it is collected and encoded in a thread.
        ready: why the coordinator does not serve now, or None if it does.
        state: what the status page shows.
        ask: asks processes what they do, for those who want to see that.
        replicas: all coordinators of the state, if there can be several.
        snapshots: views of runs that are shared with others who look; None: they are the site's own.
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
        site: to which.
        scrape: as of :func:`build_site`.
        ready: as of :func:`build_site`.
        well: what /readyz says where there is no reason against it.
    """
    answers = Answers()

    async def metrics(request: web.Request) -> web.Response:
        # The version that a client names is not looked at: each would be an answer of its own.
        asked = OPENMETRICS if OPENMETRICS in request.headers.get("Accept", "") else ""
        encode, content_type = choose_encoder(asked)

        async def make() -> Answer:
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
