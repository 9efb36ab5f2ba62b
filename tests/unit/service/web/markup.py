"""A parser of pages that is stricter than a browser."""

from collections.abc import Iterator
from html.parser import HTMLParser

VOID = {"meta", "link"}


class Markup(HTMLParser):
    """The elements of a page; every one that is opened must be closed."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.skeleton: list[tuple[str, ...]] = []
        """Tags with the names of their attributes, without anything that may be data."""
        self.values: list[tuple[str, str, str]] = []
        """(tag, attribute, value)."""
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == [], "elements are left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"an attribute of {tag} stands there twice"
        self.skeleton.append((tag, *names))
        self.values += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"{tag} is closed and was not opened"
        assert self._open.pop() == tag
        self.skeleton.append((f"/{tag}",))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def handle_pi(self, data: str) -> None:
        raise AssertionError(f"an instruction: {data}")

    def unknown_decl(self, data: str) -> None:
        raise AssertionError(f"a declaration: {data}")

    def of(self, attribute: str) -> Iterator[str]:
        """The values of an attribute, wherever it stands."""
        return (value for _, name, value in self.values if name == attribute)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())
