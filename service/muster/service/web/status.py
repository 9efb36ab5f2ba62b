"""The status page and its JSON twins: for reading, and for nothing else."""

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
from muster.service.web import links, look, pages, twins
from muster.service.web.answers import Answer, Answers, rendered, response
from muster.service.web.stacks import Ask, StacksLook, fold, read_wish
from muster.service.web.viewer import narrowed_to

T = TypeVar("T")

HTML = "text/html"
JSON = "application/json"
ASSETS = {
    "/static/app.css": ("app.css", "text/css"),
    "/static/app.js": ("app.js", "text/javascript"),
    "/static/icon.svg": ("icon.svg", "image/svg+xml"),
    # Browsers ask for it beside a twin, which cannot say where it is.
    "/favicon.ico": ("icon.svg", "image/svg+xml"),
}
"""The paths of what the page is made of, which is the same for everyone: (file, content type)."""
OVERVIEW, OVERVIEW_TWIN = "/", "/status.json"
OVERVIEWS = frozenset({OVERVIEW, OVERVIEW_TWIN})
"""The paths of the page of all runs, and of its twin; a viewer sees there what is for its token."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Of every answer of the site."""
STATUSES = {Reason.INVALID_ARGUMENT: 400, Reason.LIMIT_EXCEEDED: 429}
"""By reason, how what cannot be shown of processes is answered; else with 404."""
MOST_ASKING = 2
"""Looks at processes that are made for pages at once; ``muster stack`` is to find a place beside them."""


class State(Protocol):
    """Where the page looks; the driver is one."""

    @property
    def retired(self) -> bool:
        """Whether another coordinator may decide by now, so that what this one knows is not to be told."""
        ...

    async def query(self, ask: Callable[[Coordinator, Instant], T]) -> T:
        """Look at the state in order with the events.

        Raises:
            Refusal: as ``ask`` raises it.
        """
        ...


def add_status(
    site: web.Application,
    state: State,
    ask: Ask,
    snapshots: Snapshots,
    replicas: Replicas = no_replicas,
) -> None:
    """Add the page, its twins, and what they are made of to a site."""
    answers = Answers()
    # Processes have seconds to say where they stand, and nobody else is to wait for them.
    answers_of_processes = Answers(in_turn=False)
    places = asyncio.Semaphore(MOST_ASKING)

    async def given(
        request: web.Request, key: object, make: Callable[[], Awaitable[Answer]], among: Answers = answers
    ) -> web.StreamResponse:
        """An answer that may have been made before."""
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

    async def taken_now(grant: Grant | None) -> look.Overview:
        def taken(core: Coordinator, now: Instant) -> look.Overview:
            return replace(look.overview(core, now, snapshots, grant), replicas=tuple(replicas()))

        return await asked(taken)

    async def overview(request: web.Request) -> web.StreamResponse:
        grant = narrowed_to(request)

        async def make() -> Answer:
            taken = await taken_now(grant)
            return await _rendered(lambda: pages.overview_page(taken, _root(request)), HTML)

        return await given(request, ("overview", _patterns(grant)), make)

    async def overview_twin(request: web.Request) -> web.StreamResponse:
        grant = narrowed_to(request)

        async def make() -> Answer:
            taken = await taken_now(grant)
            return await _rendered(lambda: twins.overview_twin(taken), JSON)

        return await given(request, ("overview twin", _patterns(grant)), make)

    async def run(request: web.Request) -> web.StreamResponse:
        run_id, root = request.match_info["run"], _root(request)

        async def make() -> Answer:
            try:
                taken = await asked(lambda core, now: look.run(core, run_id, now, singly=False))
            except Refusal as refusal:
                unknown = refusal
                return await _rendered(lambda: pages.refusal_page(unknown, root), HTML, 404)
            return await _rendered(lambda: pages.run_page(taken, root), HTML)

        return await given(request, ("page", run_id, root), make)

    async def run_twin(request: web.Request) -> web.StreamResponse:
        run_id = request.match_info["run"]

        async def make() -> Answer:
            try:
                taken = await asked(lambda core, now: look.run(core, run_id, now, singly=True))
            except Refusal as refusal:
                unknown = refusal
                return await _rendered(lambda: twins.refusal_twin(unknown), JSON, 404)
            return await _rendered(lambda: twins.run_twin(taken), JSON)

        return await given(request, ("twin", run_id), make)

    async def whole_stacks(
        request: web.Request,
        content_type: str,
        show: Callable[[StacksLook], str],
        refuse: Callable[[Refusal], str],
    ) -> web.StreamResponse:
        run_id = request.match_info["run"]
        ranks, missing = tuple(request.query.getall("rank", ())), request.query.get("missing")

        async def seen() -> Answer:
            wish = read_wish(run_id, ranks, missing)
            if places.locked():
                raise _busy()
            async with places:
                processes, taken_at = await asked(
                    lambda core, now: (
                        probes.find_probe_targets(core, run_id, wish.ranks, wish.missing),
                        now.wall,
                    )
                )
                sightings = await ask(processes)
                if state.retired:
                    raise _stopping()
                return await _rendered(lambda: show(fold(taken_at, wish, sightings)), content_type)

        async def make() -> Answer:
            try:
                return await seen()
            except Refusal as refusal:
                refused = refusal
                status = STATUSES.get(refusal.reason, 404)
                return await _rendered(lambda: refuse(refused), content_type, status)

        key = content_type, run_id, _root(request), ranks, missing
        return await given(request, key, make, answers_of_processes)

    async def stacks(request: web.Request) -> web.StreamResponse:
        root = _root(request)
        return await whole_stacks(
            request,
            HTML,
            lambda taken: pages.stacks_page(taken, root),
            lambda refusal: pages.refusal_page(refusal, root, renews=False),
        )

    async def stacks_twin(request: web.Request) -> web.StreamResponse:
        return await whole_stacks(request, JSON, twins.stacks_twin, twins.refusal_twin)

    site.router.add_get(OVERVIEW, overview)
    site.router.add_get(OVERVIEW_TWIN, overview_twin)
    for route in links.STACKS_TWIN_ROUTES:
        site.router.add_get(route, stacks_twin)
    for route in links.STACKS_ROUTES:
        site.router.add_get(route, stacks)
    site.router.add_get(links.TWIN_ROUTE, run_twin)
    for route in links.PAGE_ROUTES:
        site.router.add_get(route, run)
    add_assets(site)
    site.on_response_prepare.append(add_headers)


def _patterns(grant: Grant | None) -> tuple[str, ...]:
    """Those whose runs a viewer sees; viewers with the same ones are shown the same answer."""
    return ALL if grant is None else grant.runs


def _busy() -> Refusal:
    return Refusal(
        Reason.LIMIT_EXCEEDED,
        f"processes are being asked for {MOST_ASKING} other pages, and for no more they may be "
        "(max_inspecting_pages). Load this one again in a few seconds.",
        limit="max_inspecting_pages",
        value=MOST_ASKING,
    )


def _stopping() -> web.HTTPException:
    return web.HTTPServiceUnavailable(text=f"{DRAINING.message}\n")


def add_assets(site: web.Application) -> None:
    """Add what pages are made of to a site."""
    for path, (name, content_type) in ASSETS.items():
        site.router.add_get(path, _asset(name, content_type))


async def _rendered(render: Callable[[], str], content_type: str, status: int = 200) -> Answer:
    return await rendered(lambda: render().encode(), f"{content_type}; charset=utf-8", status)


def _asset(name: str, content_type: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    body = (Path(__file__).parent / "static" / name).read_bytes()

    async def asset(_: web.Request) -> web.StreamResponse:
        return web.Response(
            body=body, content_type=content_type, charset="utf-8", headers={"Cache-Control": "no-cache"}
        )

    return asset


def _root(request: web.Request) -> str:
    """The way from a page to the root of the site, which a proxy may have put below a path of its own."""
    return "../" * (request.rel_url.raw_path.count("/") - 1)


async def add_headers(_: web.Request, answer: web.StreamResponse) -> None:
    """Set the headers of every answer of a site."""
    answer.headers.update(HEADERS)
