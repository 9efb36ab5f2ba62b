"""Where the page of a run is, whatever its id looks like."""

from collections.abc import Iterable
from urllib.parse import quote, urlencode

PAGE = ".html"
TWIN = ".json"
RUN = r"{run:[\s\S]+}"
"""The run id in a route. The router alone decodes it, so that a guard before the page sees the same id."""
TWIN_ROUTE = f"/runs/{RUN}{TWIN}"
PAGE_ROUTES = f"/runs/{RUN}{PAGE}", f"/runs/{RUN}"
"""The routes of a run's page, which come after that of its twin."""
STACKS = "stacks"
"""In a route, the part by which a page shows whole stacks, which are for operators."""
STACKS_TWIN_ROUTES = tuple(rf"{route}/{{{STACKS}:stacks\.json}}" for route in PAGE_ROUTES)
STACKS_ROUTES = tuple(f"{route}/{{{STACKS}:stacks}}" for route in PAGE_ROUTES)
"""The routes of where a run's processes stand, which come before those of the run."""


def run_page(run_id: str) -> str:
    """The path of a run's page, from the root of the site.

    The ids that would not come back from ``runs/{run}`` get the suffix that any id may have: browsers take
    ``.`` and ``..`` for folders, escaped or not, and ``.json`` is the end of a twin's path.
    """
    plain = run_id not in (".", "..") and not run_id.endswith((PAGE, TWIN))
    return f"runs/{quote(run_id, safe='')}{'' if plain else PAGE}"


def run_twin(run_id: str) -> str:
    """The path of a run's JSON twin, from the root of the site."""
    return f"runs/{quote(run_id, safe='')}{TWIN}"


def stacks_page(run_id: str, ranks: Iterable[int] = (), missing: str = "") -> str:
    """The path of where a run's processes stand, from the root of the site; of all of them, or of some."""
    return f"{run_page(run_id)}/stacks{_query(ranks, missing)}"


def stacks_twin(run_id: str, ranks: Iterable[int], missing: str) -> str:
    """The path of the JSON twin of :func:`stacks_page`."""
    return f"{run_page(run_id)}/stacks{TWIN}{_query(ranks, missing)}"


def _query(ranks: Iterable[int], missing: str) -> str:
    wishes = [*(("rank", str(rank)) for rank in ranks), *([("missing", missing)] if missing else [])]
    return f"?{urlencode(wishes, quote_via=quote, safe='')}" if wishes else ""
