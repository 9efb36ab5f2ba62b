"""The status page and its JSON views, which change nothing."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from aiohttp import web

from muster.service.core import probes
from muster.service.core.coordinator import Coordinator
from muster.service.core.vocabulary.model import Instant
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.draining import DRAINING
from muster.service.replica_list import Replicas, no_replicas
from muster.service.security.grants import Grant
from muster.service.snapshots import ALL, Snapshots
from muster.service.web import json_views, links, page_data, pages
from muster.service.web.request_grant import restricting_grant
from muster.service.web.response_cache import CachedResponse, ResponseCache, rendered, response
from muster.service.web.stacks import Ask, StacksData, build_stacks, parse_query

T = TypeVar("T")

HTML = "text/html"
JSON = "application/json"
ASSETS = {
    "/static/app.css": ("app.css", "text/css"),
    "/static/app.js": ("app.js", "text/javascript"),
    "/static/icon.svg": ("icon.svg", "image/svg+xml"),
    # Browsers ask for it beside JSON, which cannot name an icon.
    "/favicon.ico": ("icon.svg", "image/svg+xml"),
}
"""The assets, which are the same for everyone: path to (file, content type)."""
OVERVIEW, OVERVIEW_JSON = "/", "/status.json"
OVERVIEWS = frozenset({OVERVIEW, OVERVIEW_JSON})
"""The paths of all runs, as page and as JSON. They show a viewer only the runs of its token."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every response."""
STATUSES = {Reason.INVALID_ARGUMENT: 400, Reason.LIMIT_EXCEEDED: 429}
"""HTTP status by reason, if stacks cannot be shown; other reasons get 404."""
MAX_ASKING_PAGES = 2
"""Pages that ask processes at the same time, so that ``muster stack`` still finds a free slot."""


class State(Protocol):
    """The state as a page reads it; the driver implements this."""

    @property
    def retired(self) -> bool:
        """Whether another coordinator may decide by now, so that this one must not show its state."""
        ...

    async def query(self, ask: Callable[[Coordinator, Instant], T]) -> T:
        """Read the state, in order with the events.

        Raises:
            Refusal: raised by ``ask``.
        """
        ...


def add_status(
    site: web.Application,
    state: State,
    ask: Ask,
    snapshots: Snapshots,
    replicas: Replicas = no_replicas,
) -> None:
    """Add the pages, their JSON views and the assets to a site."""
    cache = ResponseCache()
    # Processes have seconds to answer, and no other page must wait for them.
    stacks_cache = ResponseCache(in_turn=False)
    slots = asyncio.Semaphore(MAX_ASKING_PAGES)

    async def given(
        request: web.Request,
        key: object,
        make: Callable[[], Awaitable[CachedResponse]],
        among: ResponseCache = cache,
    ) -> web.StreamResponse:
        """Return a response, from the cache if it is fresh."""
        if state.retired:
            raise _stopping()
        return response(request, await among.get(key, make))

    async def asked(ask: Callable[[Coordinator, Instant], T]) -> T:
        try:
            return await state.query(ask)
        except Refusal as refusal:
            if refusal.reason is Reason.COORDINATOR_DRAINING:
                raise _stopping() from None
            raise

    async def taken_now(grant: Grant | None) -> page_data.Overview:
        def taken(core: Coordinator, now: Instant) -> page_data.Overview:
            return replace(page_data.take_overview(core, now, snapshots, grant), replicas=tuple(replicas()))

        return await asked(taken)

    async def overview(request: web.Request) -> web.StreamResponse:
        grant = restricting_grant(request)

        async def make() -> CachedResponse:
            taken = await taken_now(grant)
            return await _rendered(lambda: pages.overview_page(taken, _root(request)), HTML)

        return await given(request, ("overview", _patterns(grant)), make)

    async def overview_as_json(request: web.Request) -> web.StreamResponse:
        grant = restricting_grant(request)

        async def make() -> CachedResponse:
            taken = await taken_now(grant)
            return await _rendered(lambda: json_views.overview_json(taken), JSON)

        return await given(request, ("overview json", _patterns(grant)), make)

    async def run(request: web.Request) -> web.StreamResponse:
        run_id, root = request.match_info["run"], _root(request)

        async def make() -> CachedResponse:
            try:
                taken = await asked(lambda core, now: page_data.take_run(core, run_id, now, singly=False))
            except Refusal as refusal:
                unknown = refusal
                return await _rendered(lambda: pages.refusal_page(unknown, root), HTML, 404)
            return await _rendered(lambda: pages.run_page(taken, root), HTML)

        return await given(request, ("page", run_id, root), make)

    async def run_as_json(request: web.Request) -> web.StreamResponse:
        run_id = request.match_info["run"]

        async def make() -> CachedResponse:
            try:
                taken = await asked(lambda core, now: page_data.take_run(core, run_id, now, singly=True))
            except Refusal as refusal:
                unknown = refusal
                return await _rendered(lambda: json_views.refusal_json(unknown), JSON, 404)
            return await _rendered(lambda: json_views.run_json(taken), JSON)

        return await given(request, ("run json", run_id), make)

    async def whole_stacks(
        request: web.Request,
        content_type: str,
        show: Callable[[StacksData], str],
        refuse: Callable[[Refusal], str],
    ) -> web.StreamResponse:
        run_id = request.match_info["run"]
        ranks, missing = tuple(request.query.getall("rank", ())), request.query.get("missing")

        async def seen() -> CachedResponse:
            query = parse_query(run_id, ranks, missing)
            if slots.locked():
                raise _busy()
            async with slots:
                processes, taken_at = await asked(
                    lambda core, now: (
                        probes.find_probe_targets(core, run_id, query.ranks, query.missing),
                        now.wall,
                    )
                )
                sightings = await ask(processes)
                if state.retired:
                    raise _stopping()
                return await _rendered(lambda: show(build_stacks(taken_at, query, sightings)), content_type)

        async def make() -> CachedResponse:
            try:
                return await seen()
            except Refusal as refusal:
                refused = refusal
                status = STATUSES.get(refusal.reason, 404)
                return await _rendered(lambda: refuse(refused), content_type, status)

        key = content_type, run_id, _root(request), ranks, missing
        return await given(request, key, make, stacks_cache)

    async def stacks(request: web.Request) -> web.StreamResponse:
        root = _root(request)
        return await whole_stacks(
            request,
            HTML,
            lambda taken: pages.stacks_page(taken, root),
            lambda refusal: pages.refusal_page(refusal, root, renews=False),
        )

    async def stacks_as_json(request: web.Request) -> web.StreamResponse:
        return await whole_stacks(request, JSON, json_views.stacks_json, json_views.refusal_json)

    site.router.add_get(OVERVIEW, overview)
    site.router.add_get(OVERVIEW_JSON, overview_as_json)
    for route in links.STACKS_JSON_ROUTES:
        site.router.add_get(route, stacks_as_json)
    for route in links.STACKS_ROUTES:
        site.router.add_get(route, stacks)
    site.router.add_get(links.JSON_ROUTE, run_as_json)
    for route in links.PAGE_ROUTES:
        site.router.add_get(route, run)
    add_assets(site)
    site.on_response_prepare.append(add_headers)


def _patterns(grant: Grant | None) -> tuple[str, ...]:
    """Return the patterns of the runs that a viewer sees. Viewers with the same patterns share responses."""
    return ALL if grant is None else grant.runs


def _busy() -> Refusal:
    return Refusal(
        Reason.LIMIT_EXCEEDED,
        f"{MAX_ASKING_PAGES} other pages are asking processes, and no more may do so at once "
        "(max_inspecting_pages). Load this page again in a few seconds.",
        limit="max_inspecting_pages",
        value=MAX_ASKING_PAGES,
    )


def _stopping() -> web.HTTPException:
    return web.HTTPServiceUnavailable(text=f"{DRAINING.message}\n")


def add_assets(site: web.Application) -> None:
    """Add the assets of the pages to a site."""
    for path, (name, content_type) in ASSETS.items():
        site.router.add_get(path, _asset(name, content_type))


async def _rendered(render: Callable[[], str], content_type: str, status: int = 200) -> CachedResponse:
    return await rendered(lambda: render().encode(), f"{content_type}; charset=utf-8", status)


def _asset(name: str, content_type: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    body = (Path(__file__).parent / "static" / name).read_bytes()

    async def asset(_: web.Request) -> web.StreamResponse:
        return web.Response(
            body=body, content_type=content_type, charset="utf-8", headers={"Cache-Control": "no-cache"}
        )

    return asset


def _root(request: web.Request) -> str:
    """Return the relative path to the root of the site: a proxy may serve it below a path of its own."""
    return "../" * (request.rel_url.raw_path.count("/") - 1)


async def add_headers(_: web.Request, answer: web.StreamResponse) -> None:
    """Set the headers of a response."""
    answer.headers.update(HEADERS)
