"""Where the page of a run is, whatever its id looks like."""

from urllib.parse import quote, unquote

RUNS = "runs/"
PAGE = ".html"
TWIN = ".json"


def run_page(run_id: str) -> str:
    """The path of a run's page, from the root of the site.

    The ids that would not come back from ``runs/{run}`` get the suffix that any id may have: browsers take
    ``.`` and ``..`` for folders, escaped or not, and ``.json`` is the end of a twin's path.
    """
    plain = run_id not in (".", "..") and not run_id.endswith((PAGE, TWIN))
    return f"{RUNS}{quote(run_id, safe='')}{'' if plain else PAGE}"


def run_twin(run_id: str) -> str:
    """The path of a run's JSON twin, from the root of the site."""
    return f"{RUNS}{quote(run_id, safe='')}{TWIN}"


def parse(raw_path: str) -> tuple[str, bool]:
    """The run id that a path of a request, escaped as it came, is about; and whether it is the twin's."""
    name = unquote(raw_path.partition(RUNS)[2])
    return name.removesuffix(TWIN if name.endswith(TWIN) else PAGE), name.endswith(TWIN)
