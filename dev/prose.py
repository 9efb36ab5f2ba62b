"""Finds sentences of docs and docstrings that readers stumble over: ``python -m dev.prose PATH...``.

Code, tables and headings are skipped. A path is a Markdown page, a Python module or a folder of them.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

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
    "mend": re.compile(r"\bmend(?:s|ed|ing)?\b", re.IGNORECASE),
    "is none": re.compile(r"\b(?:is|are) none\b", re.IGNORECASE),
    "the sentence begins with Of": re.compile(r"^Of\b"),
}
ROLE = re.compile(r":\w+:`[^`]*`|``[^`]+``")
"""Code in a docstring."""
SECTION = re.compile(r"^(?:Args|Returns|Yields|Raises|Attributes):$", re.MULTILINE)
ARGUMENT = re.compile(r"^\s*[\w*, .]+: ", re.MULTILINE)
"""The name before an entry of a section."""


def sentences(markdown: str) -> Iterator[str]:
    """Yield each sentence of the paragraphs and lists of a page. A piece of code is one word."""
    inside: list[str] = []
    for token in PARSER.parse(markdown):
        if token.type.endswith("_open"):
            inside.append(token.type)
        elif token.type.endswith("_close"):
            inside.pop()
        elif token.type == "inline" and not {"table_open", "heading_open"} & set(inside):
            yield from filter(None, END.split("".join(map(_text_of, token.children or ())).strip()))


def sentences_of_docstrings(source: str) -> Iterator[str]:
    """Yield each sentence of a module's docstrings, those of attributes as well."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield from _sentences_of_docstring(inspect.cleandoc(text))


def sentences_of_messages(source: str) -> Iterator[str]:
    """Yield each sentence of a module's strings. A value in an f-string is one word."""
    for text in _texts(ast.parse(source)):
        yield from filter(None, END.split(text))


def flagged(found: Iterator[str]) -> list[str]:
    """Return the sentences that have a flaw, each with what is wrong."""
    reasons = ((sentence, ", ".join(_flaws(sentence))) for sentence in found)
    return [f"{sentence}  ({why})" for sentence, why in reasons if why]


def flagged_in(path: Path) -> list[str]:
    """Return the flagged sentences of a page, a module, or all modules of a folder."""
    if path.is_dir():
        return [one for module in sorted(path.rglob("*.py")) for one in flagged_in(module)]
    text = path.read_text()
    return flagged(sentences_of_docstrings(text) if path.suffix == ".py" else sentences(text))


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the strings below a node, without docstrings."""
    match node:
        case ast.Expr(value=ast.Constant()):
            return
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr():
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "CODE" for part in node.values
            )
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _texts(child)


def _sentences_of_docstring(text: str) -> Iterator[str]:
    text = ARGUMENT.sub("\n\n", SECTION.sub("\n", ROLE.sub("CODE", text)))
    for paragraph in re.split(r"\n\s*\n", text):
        yield from filter(None, END.split(" ".join(paragraph.split())))


def _text_of(token: Token) -> str:
    if token.type in ("softbreak", "hardbreak"):
        return " "
    return "CODE" if token.type == "code_inline" else token.content


def _flaws(sentence: str) -> Iterator[str]:
    yield from (flaw for flaw, pattern in PATTERNS.items() if pattern.search(sentence))
    words = len(re.findall(r"\S*\w\S*", sentence))
    if words > MAX_WORDS:
        yield f"{words} words"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        for one in flagged_in(Path(argument)):
            print(f"{argument}: {one}")
