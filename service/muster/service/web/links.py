"""Where the page of a run is, whatever its id looks like."""

from urllib.parse import quote

PAGE = ".html"
TWIN = ".json"
RUN = r"{run:[\s\S]+}"
"""The run id in a route. The router alone decodes it, so that a guard before the page sees the same id."""
TWIN_ROUTE = f"/runs/{RUN}{TWIN}"
PAGE_ROUTES = f"/runs/{RUN}{PAGE}", f"/runs/{RUN}"
"""The routes of a run's page, which come after that of its twin."""


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
