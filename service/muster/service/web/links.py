"""Paths of the pages of a run, whatever characters its id has."""

from collections.abc import Iterable
from urllib.parse import quote, urlencode

PAGE = ".html"
JSON = ".json"
RUN = r"{run:[\s\S]+}"
"""The run id in a route. Only the router decodes it, so the access checks see the same id as the page."""
JSON_ROUTE = f"/runs/{RUN}{JSON}"
PAGE_ROUTES = f"/runs/{RUN}{PAGE}", f"/runs/{RUN}"
"""The routes of a run's page. Add them after :data:`JSON_ROUTE`."""
STACKS = "stacks"
"""The part of a route that marks pages with whole stacks, which are for operators."""
STACKS_JSON_ROUTES = tuple(rf"{route}/{{{STACKS}:stacks\.json}}" for route in PAGE_ROUTES)
STACKS_ROUTES = tuple(f"{route}/{{{STACKS}:stacks}}" for route in PAGE_ROUTES)
"""The routes of a run's stacks. Add them before those of the run."""


def run_page(run_id: str) -> str:
    """Return the path of a run's page, from the root of the site.

    Some ids would be misread in ``runs/{run}``, so they get the suffix that any id may have. Browsers take
    ``.`` and ``..`` for folders, escaped or not, and ``.json`` ends the path of a JSON view.
    """
    plain = run_id not in (".", "..") and not run_id.endswith((PAGE, JSON))
    return f"runs/{quote(run_id, safe='')}{'' if plain else PAGE}"


def run_json(run_id: str) -> str:
    """Return the path of a run as JSON, from the root of the site."""
    return f"runs/{quote(run_id, safe='')}{JSON}"


def stacks_page(run_id: str, ranks: Iterable[int] = (), missing: str = "") -> str:
    """Return the path of the stacks of all or some processes of a run, from the root of the site."""
    return f"{run_page(run_id)}/stacks{_query(ranks, missing)}"


def stacks_json(run_id: str, ranks: Iterable[int], missing: str) -> str:
    """Return the path of :func:`stacks_page` as JSON."""
    return f"{run_page(run_id)}/stacks{JSON}{_query(ranks, missing)}"


def _query(ranks: Iterable[int], missing: str) -> str:
    parameters = [*(("rank", str(rank)) for rank in ranks), *([("missing", missing)] if missing else [])]
    return f"?{urlencode(parameters, quote_via=quote, safe='')}" if parameters else ""
