import asyncio
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from hypothesis import example, given, settings
from hypothesis import strategies as st
from yarl import URL

from muster.service.web import links
from muster.service.web.status import add_status
from tests.support import scenes

SITE = web.Application()
add_status(SITE, scenes.Scene())


def routed(path: str) -> tuple[str, bool]:
    """What the router takes a path for, as it came over the wire."""
    request = make_mocked_request("GET", "/").clone(rel_url=URL(path, encoded=True))
    match = asyncio.run(SITE.router.resolve(request))
    return match["run"], match.handler.__name__ == "run_twin"


run_ids = st.text(st.characters(codec="utf-8"), min_size=1, max_size=256)


@pytest.mark.parametrize(
    ("run_id", "path"),
    [
        ("job1", "runs/job1"),
        ("team/job 1", "runs/team%2Fjob%201"),
        ("..", "runs/...html"),
        (".", "runs/..html"),
        ("a.json", "runs/a.json.html"),
        ("a.html", "runs/a.html.html"),
        ("größe?#", "runs/gr%C3%B6%C3%9Fe%3F%23"),
    ],
)
def test_a_run_has_a_page(run_id: str, path: str):
    assert links.run_page(run_id) == path


def test_a_run_has_a_twin():
    assert links.run_twin("team/job 1") == "runs/team%2Fjob%201.json"


@settings(deadline=None)
@given(run_ids)
@example("..")
@example("%2e%2e")
@example(".json")
@example("a%2Fb%252F%")
@example("a\x00\n\r\t\u202e b")
def test_every_name_comes_back_from_its_links(run_id: str):
    for path, twin in ((links.run_page(run_id), False), (links.run_twin(run_id), True)):
        assert set(path) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/%._-~")
        assert path.count("/") == 1
        assert path.partition("/")[2] not in (".", ".."), "browsers take it for a folder"
        assert urlsplit(f"/{path}").path == f"/{path}"
        assert routed(f"/{path}") == (run_id, twin)


@pytest.mark.parametrize(
    ("path", "run_id", "twin"),
    [
        ("/runs/team/job1", "team/job1", False),
        ("/runs/runs/runs/.json", "runs/runs/", True),
        ("/runs/.json", ".json", False),
        ("/runs/a%2fb%2Fc%252fd", "a/b/c%2fd", False),
        ("/runs/a.json?b.html", "a", True),
    ],
)
def test_whatever_a_path_says_is_one_name(path: str, run_id: str, twin: bool):
    assert routed(path) == (run_id, twin)
