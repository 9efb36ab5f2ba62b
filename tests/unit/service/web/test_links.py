import asyncio
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from hypothesis import example, given, settings
from hypothesis import strategies as st
from yarl import URL

from lab import scenes
from muster.service.snapshots import Snapshots
from muster.service.web import links
from muster.service.web.status import add_status

SITE = web.Application()
add_status(SITE, scenes.Scene(), scenes.Scene().ask, Snapshots())


def routed(path: str) -> tuple[str, str]:
    """What the router takes a path for, as it came over the wire."""
    request = make_mocked_request("GET", "/").clone(rel_url=URL(path, encoded=True))
    match = asyncio.run(SITE.router.resolve(request))
    return match["run"], match.handler.__name__


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


def test_run_has_a_json_view():
    assert links.run_json("team/job 1") == "runs/team%2Fjob%201.json"


@pytest.mark.parametrize(
    ("run_id", "page"),
    [
        ("job1", "runs/job1/stacks"),
        ("team/stacks", "runs/team%2Fstacks/stacks"),
        ("..", "runs/...html/stacks"),
        ("a.json", "runs/a.json.html/stacks"),
    ],
)
def test_stacks_have_a_page_and_a_json_view(run_id: str, page: str):
    assert links.stacks_page(run_id) == page
    assert links.stacks_json(run_id, (), "") == f"{page}.json"


def test_stacks_links_have_ranks_and_missing_group_in_the_query():
    query = "?rank=3&rank=5&missing=a%2Fb%26c%20d%23"
    assert links.stacks_page("job1", (3, 5), "a/b&c d#") == f"runs/job1/stacks{query}"
    assert links.stacks_json("job1", (3, 5), "a/b&c d#") == f"runs/job1/stacks.json{query}"


@settings(deadline=None)
@given(run_ids)
@example("..")
@example("%2e%2e")
@example(".json")
@example("a%2Fb%252F%")
@example("a/stacks")
@example("a/stacks.json")
@example("a\x00\n\r\t\u202e b")
def test_every_name_comes_back_from_its_links(run_id: str):
    for path, handler in (
        (links.run_page(run_id), "run"),
        (links.run_json(run_id), "run_as_json"),
        (links.stacks_page(run_id), "stacks"),
        (links.stacks_json(run_id, (), ""), "stacks_as_json"),
    ):
        assert set(path) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/%._-~")
        assert path.count("/") == (2 if "stacks" in handler else 1)
        assert not {".", ".."} & {*path.split("/")}, "browsers take it for a folder"
        assert urlsplit(f"/{path}").path == f"/{path}"
        assert routed(f"/{path}") == (run_id, handler)


@pytest.mark.parametrize(
    ("path", "run_id", "handler"),
    [
        ("/runs/team/job1", "team/job1", "run"),
        ("/runs/runs/runs/.json", "runs/runs/", "run_as_json"),
        ("/runs/.json", ".json", "run"),
        ("/runs/a%2fb%2Fc%252fd", "a/b/c%2fd", "run"),
        ("/runs/a.json?b.html", "a", "run_as_json"),
        ("/runs/team/job1/stacks", "team/job1", "stacks"),
        ("/runs/a%2fstacks", "a/stacks", "run"),
        ("/runs/a/stacks.html", "a/stacks", "run"),
        ("/runs/stacks", "stacks", "run"),
        ("/runs/a/stacks.json?rank=3", "a", "stacks_as_json"),
    ],
)
def test_whatever_a_path_says_is_one_name(path: str, run_id: str, handler: str):
    assert routed(path) == (run_id, handler)
