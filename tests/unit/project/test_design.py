"""docs/design.md: each invariant has places and tests that exist, and each citation names one of them."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/design.md"
SOURCES = ("service", "relay", "watcher", "keeper", "preload", "client", "checkpoint", "worker_sdk")
FOLDERS = (*SOURCES, "tests", "examples", "benchmarks", "dev", "docs", "proto/muster", "deploy")
SUFFIXES = {".md", ".proto", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}
SCENARIOS = "tests/unit/service/core/scenarios/"
HERE = Path(__file__)

HEADING = re.compile(r"### (?P<number>\d+)\. (?P<title>.+)")
ITEM = re.compile(r"- `(?P<name>[^`]+)`")
CITATION = re.compile(r"\binvariants? (?P<number>\d+)(?: \((?P<title>[^)]*)\))?", re.IGNORECASE)
OLD_CITATION = re.compile(
    r"\bdesign\.md §|\b(?:design )?rules? \(?\d+\b|\bdesign rules?\b|§ ?\d", re.IGNORECASE
)
MARGIN = re.compile(r"\n\s*(?:#|//|\*)?\s*")
"""The end of a line, and how the next line of a docstring, a comment or a list begins."""


@dataclass(frozen=True)
class Invariant:
    """One section of the page."""

    number: int
    title: str
    planned: bool
    places: tuple[str, ...]
    tests: tuple[str, ...]


def read_invariants(text: str) -> list[Invariant]:
    found = []
    for part in re.split(r"(?m)^(?=###? )", text):
        if heading := HEADING.match(part):
            body, _, tests = part.partition("\nTested by:\n")
            body, _, places = body.partition("\nKept by:\n")
            planned = "\nPlanned: " in body
            names = [tuple(ITEM.findall(items)) for items in (places, tests)]
            found.append(Invariant(int(heading["number"]), heading["title"], planned, *names))
    return found


INVARIANTS = read_invariants(PAGE.read_text())


@cache
def names_in(path: Path) -> frozenset[str]:
    """The functions, classes, methods and variables of a module, with dots between class and method."""

    def names(body: list[ast.stmt], before: str) -> Iterator[str]:
        for one in body:
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield before + one.name
            if isinstance(one, ast.ClassDef):
                yield from names(one.body, f"{before}{one.name}.")
            if isinstance(one, ast.Assign | ast.AnnAssign):
                targets = one.targets if isinstance(one, ast.Assign) else [one.target]
                yield from (before + target.id for target in targets if isinstance(target, ast.Name))

    return frozenset(names(ast.parse(path.read_text()).body, ""))


def place_exists(place: str) -> bool:
    """Whether ``muster.package.module.Class.method`` is defined in the sources."""
    parts = place.split(".")
    for end in range(len(parts) - 1, 0, -1):
        for source in SOURCES:
            path = ROOT.joinpath(source, *parts[:end]).with_suffix(".py")
            if path.is_file():
                return ".".join(parts[end:]) in names_in(path)
    return False


def pytest_finds(test: str) -> bool:
    """Whether ``tests/folder/test_module.py::test_name`` is defined there, or ``test`` is a scenario file."""
    path, _, name = test.partition("::")
    if path.startswith(SCENARIOS) and path.endswith(".txt"):
        return (ROOT / path).is_file() and not name
    return (ROOT / path).is_file() and name.replace("::", ".") in names_in(ROOT / path)


def problems(invariants: list[Invariant]) -> Iterator[str]:
    for one in invariants:
        name = f"invariant {one.number} ({one.title})"
        if one.planned:
            if one.places or one.tests:
                yield f"{name} is planned, and has a place or a test"
            continue
        if not one.places:
            yield f"{name} has no place that keeps it"
        if not one.tests:
            yield f"{name} has no test"
        yield from (f"{name}: {place} is not there" for place in one.places if not place_exists(place))
        yield from (f"{name}: {test} is not there" for test in one.tests if not pytest_finds(test))


def wrong_citations(text: str, invariants: list[Invariant]) -> Iterator[str]:
    titles = {one.number: one.title for one in invariants if not one.planned}
    text = MARGIN.sub(" ", text)
    for cited in CITATION.finditer(text):
        title = titles.get(int(cited["number"]))
        if title is None:
            yield f"{cited[0]!r}: docs/design.md has no such invariant, or only plans it"
        elif (cited["title"] or "").casefold() != title.casefold():
            yield f"{cited[0]!r}: write invariant {cited['number']} ({title})"
    yield from (f"{old[0]!r}: cite invariant N (its short title)" for old in OLD_CITATION.finditer(text))


def files() -> list[Path]:
    below = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    return sorted(path for path in (*ROOT.glob("*"), *below) if path.suffix in SUFFIXES and path != HERE)


def test_page_numbers_its_invariants_without_gaps():
    assert sorted(one.number for one in INVARIANTS) == list(range(1, len(INVARIANTS) + 1))


def test_every_invariant_has_places_and_tests_that_exist():
    assert list(problems(INVARIANTS)) == []


def test_every_citation_names_an_invariant():
    wrong = {path.relative_to(ROOT): list(wrong_citations(path.read_text(), INVARIANTS)) for path in files()}
    assert {path: found for path, found in wrong.items() if found} == {}


def test_citations_are_found():
    """The search would see none if its folders or its pattern were wrong."""
    cited = {
        int(found["number"])
        for path in files()
        for found in CITATION.finditer(MARGIN.sub(" ", path.read_text()))
    }
    assert cited >= {2, 8, 16}


SAMPLE = """
### 1. Kept well

Text.

Kept by:

- `muster.service.core.barriers.group.Group.join`

Tested by:

- `tests/unit/project/test_design.py::test_citations_are_found`

### 2. Not yet

Planned: nothing keeps it.

## Other

### 3. Kept by nothing

Text.

Kept by:

- `muster.service.core.barriers.group.Group.no_such_method`

### 4. Tested by nothing

Tested by:

- `tests/unit/project/test_design.py::test_no_such_test`
- `tests/unit/service/core/scenarios/no_such_file.txt`
"""


def test_invariant_without_a_place_or_a_test_is_a_problem():
    assert list(problems(read_invariants(SAMPLE))) == [
        "invariant 3 (Kept by nothing) has no test",
        "invariant 3 (Kept by nothing): muster.service.core.barriers.group.Group.no_such_method is not there",
        "invariant 4 (Tested by nothing) has no place that keeps it",
        "invariant 4 (Tested by nothing): tests/unit/project/test_design.py::test_no_such_test is not there",
        f"invariant 4 (Tested by nothing): {SCENARIOS}no_such_file.txt is not there",
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param("As invariant 1 (kept well) says.", "", id="good"),
        pytest.param("# As invariant 1\n    # (kept well) says.", "", id="over two lines"),
        pytest.param("Invariant 1 (kept well): it is kept.", "", id="at the start"),
        pytest.param("invariant 1", "write invariant 1 (Kept well)", id="no title"),
        pytest.param("invariant 1 (kept badly)", "write invariant 1 (Kept well)", id="another title"),
        pytest.param("invariant 9 (kept well)", "no such invariant", id="another number"),
        pytest.param("invariant 2 (not yet)", "or only plans it", id="planned"),
        pytest.param("design rule 8", "cite invariant N", id="a rule of the design"),
        pytest.param("(rule 2)", "cite invariant N", id="a rule"),
        pytest.param("the rules of design.md §3", "cite invariant N", id="a section"),
        pytest.param("(§3)", "cite invariant N", id="a section alone"),
    ],
)
def test_wrong_citation_is_found(text: str, found: str):
    wrong = list(wrong_citations(text, read_invariants(SAMPLE)))
    assert (not wrong) if not found else (len(wrong) == 1 and found in wrong[0])
