"""The prose of README.md and docs/ is plain English: no sentence has a pattern that readers stumble over.

Code, tables and headings are not looked at, nor is docs/benchmarks, which programs write.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("docs", "docs/decisions", "docs/integrations")
PAGES = [
    "README.md",
    *(page.relative_to(ROOT).as_posix() for one in FOLDERS for page in (ROOT / one).glob("*.md")),
]

NOT_YET_CLEAN: dict[str, int] = {
    "docs/operations.md": 1,
}
"""How many flagged sentences a page still has. Lower the number when you rewrite some; never add a page."""

PARSER = MarkdownIt("commonmark").enable("table")
END = re.compile(r"(?<=[.!?])[)\"”]?\s+")
MAX_WORDS = 35
HEAD_AFTER = r"[;:–] |\(|, (?=who\b)|\b(?:and|but|by|for|from|of|or|than|that|to|with) "
PATTERNS = {
    "a clause begins with who or whose": re.compile(
        rf"(?:^(?!.*\?$)|{HEAD_AFTER})(?:who|whose)\b", re.IGNORECASE
    ),
    "whom or whoever": re.compile(r"\b(?:whom|whoever)\b", re.IGNORECASE),
    "anew": re.compile(r"\banew\b", re.IGNORECASE),
    "is none": re.compile(r"\b(?:is|are) none\b", re.IGNORECASE),
    "the sentence begins with Of": re.compile(r"^Of\b"),
}


def sentences(markdown: str) -> Iterator[str]:
    """Each sentence of the paragraphs and lists. A piece of code is one word."""
    inside: list[str] = []
    for token in PARSER.parse(markdown):
        if token.type.endswith("_open"):
            inside.append(token.type)
        elif token.type.endswith("_close"):
            inside.pop()
        elif token.type == "inline" and not {"table_open", "heading_open"} & set(inside):
            yield from filter(None, END.split("".join(map(text_of, token.children or ())).strip()))


def text_of(token: Token) -> str:
    if token.type in ("softbreak", "hardbreak"):
        return " "
    return "CODE" if token.type == "code_inline" else token.content


def flaws(sentence: str) -> Iterator[str]:
    yield from (flaw for flaw, pattern in PATTERNS.items() if pattern.search(sentence))
    words = len(re.findall(r"\S*\w\S*", sentence))
    if words > MAX_WORDS:
        yield f"{words} words"


def flagged(markdown: str) -> list[str]:
    found = ((sentence, ", ".join(flaws(sentence))) for sentence in sentences(markdown))
    return [f"{sentence}  ({why})" for sentence, why in found if why]


@pytest.mark.parametrize("page", PAGES)
def test_page_has_no_more_flagged_sentences_than_listed(page: str):
    found = flagged((ROOT / page).read_text())
    listed = NOT_YET_CLEAN.get(page, 0)
    assert len(found) <= listed, "Rewrite these, or as many others:\n" + "\n".join(found)
    assert len(found) == listed, f"Set {page} to {len(found)} in NOT_YET_CLEAN, or remove it at 0"


def test_page_that_newcomers_read_first_is_clean():
    first = ("README.md", "docs/glossary.md", "docs/design.md", "docs/decisions/")
    assert [page for page in NOT_YET_CLEAN if page.startswith(first) or page not in PAGES] == []


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
    assert len(flagged(text)) == count


def test_glossary_has_each_term_once_in_alphabetical_order():
    terms = re.findall(r"(?m)^- \*\*(.+?)\*\*: ", (ROOT / "docs/glossary.md").read_text())
    assert terms == sorted(set(terms), key=str.casefold)
    assert {"barrier", "checkpoint", "decision", "run"} <= set(terms)
