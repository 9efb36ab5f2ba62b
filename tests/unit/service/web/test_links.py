from urllib.parse import urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from yarl import URL

from muster.service.web import links

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


@given(run_ids)
@example("..")
@example("%2e%2e")
@example(".json")
@example("a\x00\n\r\t\u202e b")
def test_every_name_comes_back_from_its_links(run_id: str):
    for path, twin in ((links.run_page(run_id), False), (links.run_twin(run_id), True)):
        assert set(path) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/%._-~")
        assert path.count("/") == 1
        assert path.partition("/")[2] not in (".", ".."), "browsers take it for a folder"
        assert urlsplit(f"/{path}").path == f"/{path}"
        assert links.parse(URL(f"/{path}", encoded=True).raw_path) == (run_id, twin)


def test_slashes_that_came_unescaped_are_part_of_the_name():
    assert links.parse("/runs/team/job1") == ("team/job1", False)
    assert links.parse("/runs/runs/runs/.json") == ("runs/runs/", True)
