"""The troubleshooting page quotes messages that the sources have."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
SOURCES = ("service", "relay", "watcher", "keeper", "preload", "client", "checkpoint", "worker_sdk")
SYMPTOMS = re.findall(r"(?ms)^### (.+?)\n\n(.+?)(?=\n\n)", PAGE)
QUOTED = re.compile(r"(?s)`([^`]+)`")


def _text(node: ast.AST) -> str:
    """Return the text of a literal, with ``…`` for the values that it formats; else nothing."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr():
            return "".join(_text(part) or "…" for part in node.values)
        case _:
            return ""


@cache
def _literals() -> str:
    """Return every text of the product's sources."""
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    return "\n".join(_text(node) for file in files for node in ast.walk(ast.parse(file.read_text())))


def _quoted(symptom: str) -> list[str]:
    seen = symptom.partition("- **Why**")[0]
    return [" ".join(one.split()) for one in QUOTED.findall(seen)]


@pytest.mark.parametrize(("name", "text"), SYMPTOMS, ids=[name for name, _ in SYMPTOMS])
def test_symptom_quotes_messages_of_the_sources(name: str, text: str):
    fragments = [part.strip() for one in _quoted(text) for part in re.split(r"…", one)]
    # A command, a class, a metric and a punctuation mark are no messages.
    messages = [one for one in fragments if " " in one and not one.startswith(("muster ", "helm "))]
    assert [one for one in messages if one not in _literals()] == []


@pytest.mark.parametrize(("name", "text"), SYMPTOMS, ids=[name for name, _ in SYMPTOMS])
def test_symptom_says_what_one_sees_why_and_what_next(name: str, text: str):
    assert re.findall(r"(?m)^- \*\*(.+?)\*\*: ", text) == ["You see", "Why", "Next"]
    assert len(text.splitlines()) <= 10
    assert len(SYMPTOMS) >= 15
