"""The architecture page names modules and functions that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/architecture.md").read_text()
SOURCES = ("service", "relay", "watcher", "keeper", "preload", "client", "checkpoint", "worker_sdk")
FILES = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]


def test_modules_that_the_page_names_are_there():
    places = [path.as_posix() for path in FILES]
    named = {one.lstrip("/") for one in re.findall(r"[\w/]+\.py", PAGE)}
    assert [one for one in named if not any(place.endswith(f"/{one}") for place in places)] == []


def test_each_module_of_the_saves_is_named_with_its_folder():
    saves = ROOT / "worker_sdk/muster/worker/saves"
    there = {path.relative_to(saves).as_posix() for path in saves.rglob("*.py") if path.name != "__init__.py"}
    assert there - set(re.findall(r"`([\w/]+\.py)`", PAGE)) == set()


def test_paths_that_the_page_names_are_there():
    named = re.findall(rf"`((?:{'|'.join(SOURCES)})/…/[\w/.]+)`", PAGE)
    split = [one.split("/…/") for one in named]
    assert split
    assert [one for one in split if not list((ROOT / one[0]).rglob(one[1]))] == []


def test_functions_of_the_sequence_diagrams_are_there():
    diagrams = "".join(re.findall(r"(?s)sequenceDiagram\n(.+?)```", PAGE))
    named = set(re.findall(r"(\w+)\(", diagrams))
    defined = set(
        re.findall(r"(?m)^\s*(?:async )?(?:def|class) (\w+)", "".join(p.read_text() for p in FILES))
    )
    assert len(named) > 20
    assert named - defined == set()
