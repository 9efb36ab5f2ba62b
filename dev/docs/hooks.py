"""MkDocs' hooks: the generated pages, and those files outside docs/ that a page links to.

A file outside docs/ gets a page below ``repository/`` under its own path, so that links hold on the site
as they do on a Git host.
"""

import os
import sys
from functools import partial
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from dev.docs import protocol, reference
from dev.docs.markdown import links

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "repository"
MERMAID = Path(sys.prefix) / "assets/artoo_mermaid/assets/mermaid.min.js"
"""What draws the diagrams; of the wheel that requirements/docs-assets.txt pins."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    add = partial(File.generated, config)
    _check_docstrings()
    for name, page in reference.PAGES.items():
        files.append(add(f"sdk/{name}.md", content=reference.markdown(page)))
    for name, text in protocol.pages(protocol.descriptors()).items():
        files.append(add(f"protocol/{name}.md", content=text))
    for path in _outside():
        content = path.read_text()
        files.append(
            add(_site_path(path), content=content if path.suffix == ".md" else _listing(path, content))
        )
    files.append(add("assets/mermaid.min.js", abs_src_path=str(MERMAID)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where the files are on the site."""
    source = _repository_path(page.file.src_uri)
    if source is None:
        return markdown
    for link in links(markdown):
        if link.path:
            target = (source.parent / link.path).resolve()
            place = os.path.relpath(_site_path(target), Path(page.file.src_uri).parent)
            anchor = f"#{link.anchor}" if link.anchor else ""
            markdown = markdown.replace(f"]({link.target})", f"]({place}{anchor})")
    return markdown


def _check_docstrings() -> None:
    found = reference.problems(reference.load())
    if found:
        raise PluginError("\n".join(found))


def _outside() -> list[Path]:
    """The files outside docs/ that a page of the site links to, or a page of those."""
    docs = ROOT / "docs"
    pages = sorted(docs.rglob("*.md"))
    found: dict[Path, None] = {}
    for page in pages:
        for link in links(page.read_text()):
            target = (page.parent / link.path).resolve() if link.path else page
            if target.is_relative_to(docs) or target in found or not target.is_file():
                continue
            found[target] = None
            if target.suffix == ".md":
                pages.append(target)
    return list(found)


def _listing(path: Path, content: str) -> str:
    name = path.relative_to(ROOT)
    language = {".py": "python", ".yaml": "yaml"}.get(path.suffix, "text")
    return f"# {name}\n\n````{language}\n{content}\n````\n"


def _site_path(path: Path) -> str:
    """Where a file of the repository is on the site."""
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").as_posix()
    name = path.relative_to(ROOT).as_posix()
    return f"{REPOSITORY}/{name}" + ("" if path.suffix == ".md" else ".md")


def _repository_path(uri: str) -> Path | None:
    """The file that a page of the site was made of; None for a generated one."""
    if uri.startswith(f"{REPOSITORY}/"):
        return ROOT / uri.removeprefix(f"{REPOSITORY}/")
    path = ROOT / "docs" / uri
    return path if path.exists() else None
