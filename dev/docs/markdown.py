"""What a page of Markdown points at, and what can be pointed at in it, as a Git host shows it."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

_PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
_HTML_TARGET = re.compile(r'\b(?:href|src)="([^"]+)"')
_HTML_ANCHOR = re.compile(r'\b(?:id|name)="([^"]+)"')
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Link:
    """A link or an image."""

    line: int
    """First line of its paragraph or table, from 1."""
    target: str
    """As it is written."""

    @property
    def path(self) -> str:
        """The file, relative to the page's; empty for the page itself."""
        return unquote(self.target.partition("#")[0])

    @property
    def anchor(self) -> str:
        """The heading; empty for the page as a whole."""
        return unquote(self.target.partition("#")[2])


def links(text: str) -> Iterator[Link]:
    """All links and images that do not lead to another host."""
    for line, token in _inline(text):
        found = [str(token.attrs[name]) for name in ("href", "src") if name in token.attrs]
        if token.type in ("html_inline", "html_block"):
            found = _HTML_TARGET.findall(token.content)
        yield from (Link(line, target) for target in found if not _ELSEWHERE.match(target))


def anchors(text: str) -> set[str]:
    """What a link may name behind ``#``: the headings, spelled as GitHub and GitLab do, and ids in HTML."""
    found: Counter[str] = Counter()
    tokens = _PARSER.parse(text)
    names = set()
    for before, token in pairwise(tokens):
        if before.type == "heading_open":
            slug = _slug(token)
            names.add(f"{slug}-{found[slug]}" if found[slug] else slug)
            found[slug] += 1
    for _, token in _inline(text):
        if token.type in ("html_inline", "html_block"):
            names.update(_HTML_ANCHOR.findall(token.content))
    return names


def broken(page: Path, root: Path) -> list[str]:
    """A sentence for each link of a page that leads nowhere.

    Args:
        page: the file.
        root: the repository, which no link may leave.
    """
    return [
        f"{page.relative_to(root)}:{link.line}: ({link.target}) {problem}"
        for link in links(page.read_text())
        if (problem := _problem(link, page, root))
    ]


def _problem(link: Link, page: Path, root: Path) -> str:
    target = (page.parent / link.path).resolve() if link.path else page
    if link.path.startswith("/") or not target.is_relative_to(root):
        return "leaves the repository"
    if not target.exists():
        return "is not there"
    if target.is_dir():
        return "is a folder, and the site has files alone"
    if link.anchor and target.suffix == ".md" and link.anchor not in anchors(target.read_text()):
        return "is no heading of that page"
    return ""


def _inline(text: str) -> Iterator[tuple[int, Token]]:
    """Every token that may be a link, and its line."""
    for block in _PARSER.parse(text):
        line = block.map[0] + 1 if block.map else 0
        yield line, block
        yield from ((line, token) for token in block.children or ())


def _slug(heading: Token) -> str:
    text = "".join(token.content for token in heading.children or () if token.type in ("text", "code_inline"))
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
