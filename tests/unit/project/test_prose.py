"""Docs and docstrings are plain English: no sentence has a pattern that readers stumble over.

``dev/prose.py`` has the patterns. Pages in docs/benchmarks are not checked: programs write them.
"""

import re
from pathlib import Path

import pytest

from dev.prose import flagged, flagged_in, sentences, sentences_of_docstrings, sentences_of_messages

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("docs", "docs/decisions", "docs/integrations")
PAGES = [
    *("README.md", "CONTRIBUTING.md"),
    *(page.relative_to(ROOT).as_posix() for one in FOLDERS for page in (ROOT / one).glob("*.md")),
]
SERVICE = "service/muster/service"
WORKER = "worker_sdk/muster/worker"
CODE = [
    *(f"{SERVICE}/{path.name}" for path in sorted((ROOT / SERVICE).iterdir())),
    *(f"{WORKER}/{path.name}" for path in sorted((ROOT / WORKER).iterdir())),
    *("checkpoint", "client", "relay", "watcher", "keeper", "preload"),
    *("benchmarks", "dev", "examples", "lab"),
    *("tests/contract", "tests/integration", "tests/support", "tests/unit"),
]
TEXTS = [
    *("service", "relay", "client", "checkpoint", "worker_sdk", "watcher", "keeper", "preload"),
    "proto/muster",
    *("tests", "lab", "benchmarks", "dev", "examples", "deploy"),
]
MESSAGES = [
    *(path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("*/muster/**/refusals.py"))),
    f"{SERVICE}/core/vocabulary/report.py",
]
"""Modules whose strings people read."""
SUFFIXES = {".py", ".proto", ".tpl", ".yaml", ".txt", ".md", ".sh", ".html", ".js"}
OLD_WORDS = re.compile(r"\b(?:whom|whoever|anew|mend(?:s|ed|ing)?)\b", re.IGNORECASE)
ABOUT_WORDS = {ROOT / "dev/prose.py", Path(__file__).resolve()}
CLAUSES = re.compile(r"_(?:who|whom|whose|whoever|anew)(?:_|$)|^test_what_")
CODE = [name for name in CODE if name.endswith(".py") or (ROOT / name).is_dir()]


@pytest.mark.parametrize("name", [*PAGES, *CODE])
def test_page_or_folder_has_no_flagged_sentence(name: str):
    found = flagged_in(ROOT / name)
    assert not found, "Rewrite these:\n" + "\n".join(found)


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_have_no_flagged_sentence(name: str):
    found = flagged(sentences_of_messages((ROOT / name).read_text()))
    assert not found, "Rewrite these:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        pytest.param("Who has been silent is called last.", 1, id="who at the start"),
        pytest.param("If a rank dies, who waits for it is told.", 1, id="who after a comma"),
        pytest.param("It is sent to whom it concerns.", 1, id="whom"),
        pytest.param("The error of who waits.", 1, id="who after a preposition"),
        pytest.param("The timeout begins\nanew.", 1, id="anew"),
        pytest.param("There is none that leads.", 1, id="is none"),
        pytest.param("It runs. Of a rank that died the writer stays.", 1, id="Of at the start"),
        pytest.param("- " + "word " * 36, 1, id="36 words"),
        pytest.param("- " + "word " * 35, 0, id="35 words"),
        pytest.param(f"`{'word ' * 36}` is one word.", 0, id="code"),
        pytest.param(f"```\n{'word ' * 36}\n```", 0, id="a block of code"),
        pytest.param(f"| Who |\n|-|\n| {'word ' * 36} |", 0, id="a table"),
        pytest.param(
            "Who leads? A rank whose state is unchanged writes.", 0, id="a question, and whose after a noun"
        ),
        pytest.param(
            "Who waits is told anew. Whoever came is not.", 2, id="two flaws in one sentence count once"
        ),
    ],
)
def test_flagged_sentences_are_counted(text: str, count: int):
    assert len(flagged(sentences(text))) == count


def test_docstrings_of_modules_classes_functions_and_attributes_are_checked():
    source = '''
"""Whoever reads this."""

class A:
    """Whoever makes one.

    Args:
        name: whoever it is.
    """

    name: str
    """Whoever it is; ``whoever`` is code."""

    def call(self):
        """Call whoever."""
        # whoever
        return "whoever"
'''
    assert len(flagged(sentences_of_docstrings(source))) == 5


def test_strings_of_modules_are_checked_and_their_docstrings_are_not():
    source = '''
"""Whoever reads this."""

def message(name: str) -> str:
    """Whoever it is."""
    return say(f"{name} is here. Whoever " f"{name} is waits.", "Mend it.")
'''
    found = flagged(sentences_of_messages(source))
    assert [one.partition("  (")[0] for one in found] == ["Whoever CODE is waits.", "Mend it."]


def test_no_text_has_an_old_word():
    """Comments, messages, protos and the chart have the plainer words, too."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for folder in TEXTS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in SUFFIXES and path not in ABOUT_WORDS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if OLD_WORDS.search(line)
    ]
    assert not found, "Rewrite these:\n" + "\n".join(found)


def test_names_of_tests_are_plain():
    """A name says the subject and the behaviour. A relative clause hides the subject."""
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for name in re.findall(r"(?m)^ *(?:async )?def (test_\w+)", path.read_text())
        if CLAUSES.search(name)
    ]
    assert not found, "Rename these:\n" + "\n".join(found)


def test_glossary_has_each_term_once_in_alphabetical_order():
    terms = re.findall(r"(?m)^- \*\*(.+?)\*\*: ", (ROOT / "docs/glossary.md").read_text())
    assert terms == sorted(set(terms), key=str.casefold)
    assert {"barrier", "checkpoint", "decision", "run"} <= set(terms)
