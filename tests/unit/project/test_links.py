"""Every link of the Markdown in the repository leads somewhere."""

from pathlib import Path

import pytest

from dev.docs.markdown import anchors, broken, links

ROOT = Path(__file__).resolve().parents[3]
MADE = {"build", "dist"}
FOLDERS = [one for one in ROOT.iterdir() if one.is_dir() and one.name not in MADE and one.name[0] != "."]
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in folder.rglob("*.md"))])


def test_the_pages_are_found():
    names = {page.relative_to(ROOT).as_posix() for page in PAGES}
    assert names > {"README.md", "CHANGELOG.md", "docs/operations.md", "deploy/helm/muster/README.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_link_is_broken(page: Path):
    assert broken(page, ROOT) == []


@pytest.mark.parametrize(
    ("text", "target", "problem"),
    [
        pytest.param("[x](there.md)", "there.md", "", id="a page"),
        pytest.param("[x](there.md#a-heading)", "there.md#a-heading", "", id="a heading"),
        pytest.param("# Here\n[x](#here)", "#here", "", id="a heading of this page"),
        pytest.param("[x](folder/a%20b.txt)", "folder/a%20b.txt", "", id="a name with a space"),
        pytest.param("[x](none.md)", "none.md", "is not there", id="no page"),
        pytest.param("[x](folder)", "folder", "is a folder, and the site has files alone", id="a folder"),
        pytest.param("![x](none.png)", "none.png", "is not there", id="no picture"),
        pytest.param('<img src="none.png">', "none.png", "is not there", id="no picture, in HTML"),
        pytest.param("[x]\n\n[x]: none.md", "none.md", "is not there", id="a reference"),
        pytest.param("| a |\n|-|\n| [x](none.md) |", "none.md", "is not there", id="in a table"),
        pytest.param("[x](there.md#none)", "there.md#none", "is no heading of that page", id="no heading"),
        pytest.param("[x](#none)", "#none", "is no heading of that page", id="no heading here"),
        pytest.param("[x](../out.md)", "../out.md", "leaves the repository", id="out of the repository"),
        pytest.param("[x](/there.md)", "/there.md", "leaves the repository", id="from the root"),
    ],
)
def test_broken_link_is_reported_and_valid_link_is_not(text: str, target: str, problem: str, tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a b.txt").touch()
    (tmp_path / "there.md").write_text("# A heading\n")
    page = tmp_path / "page.md"
    page.write_text(text)
    assert [one.target for one in links(text)] == [target]
    found = [one.partition(f"({target}) ")[2] for one in broken(page, tmp_path)]
    assert found == ([problem] if problem else [])


def test_links_in_code_and_external_urls_are_ignored():
    text = "`[x](none.md)` and [y](https://example.com/none.md)\n\n```\n[z](none.md)\n```\n"
    assert list(links(text)) == []


def test_headings_are_spelled_as_git_hosts_do():
    text = '# What `muster` *ends* with, and why?\n## A – b_c\n## Twice\n## Twice\n\n<a id="x"></a>\n'
    assert anchors(text) == {"what-muster-ends-with-and-why", "a--b_c", "twice", "twice-1", "x"}
