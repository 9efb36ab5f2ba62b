"""The references on the site are whole: every public name and every part of the protocol is in them."""

from pathlib import Path

import pytest
import yaml
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from dev.docs import protocol, reference

ROOT = Path(__file__).resolve().parents[3]


class Loader(yaml.SafeLoader):
    """Reads MkDocs' configuration without the objects that its tags name."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
NAVIGATION = str(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"])

DOCS = ROOT / "docs"


@pytest.mark.parametrize("page", sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")))
def test_every_page_of_the_docs_is_in_the_navigation(page: str):
    assert f"'{page}'" in NAVIGATION


# ---------------------------------------------------------------------- of the SDK


def test_every_public_name_is_on_a_page_and_has_a_docstring():
    assert reference.problems(reference.load()) == []


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the SDK's sources that a test may change."""
    for source in (reference.SOURCES / "muster/worker").rglob("*.py"):
        copy = tmp_path / source.relative_to(reference.SOURCES)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(source.read_text())
    return tmp_path / "muster/worker"


@pytest.mark.parametrize(
    ("file", "before", "after", "problem"),
    [
        pytest.param(
            "__init__.py",
            '    "close",\n',
            '    "close",\n    "session",\n',
            "muster.worker.session is on no page of the reference: name it in PAGES of reference.py",
            id="a new name",
        ),
        pytest.param(
            "closed.py",
            '    """The author of the call, for people."""\n',
            "",
            "muster.worker.closed.Closed.by has no docstring",
            id="an attribute",
        ),
        pytest.param(
            "errors.py",
            '    """The base class of all errors of this SDK."""\n',
            "    pass\n",
            "muster.worker.errors.MusterError has no docstring",
            id="a class",
        ),
    ],
)
def test_missing_reference_entry_or_docstring_is_named(
    package: Path, file: str, before: str, after: str, problem: str
):
    text = (package / file).read_text()
    assert before in text
    (package / file).write_text(text.replace(before, after))
    assert reference.problems(reference.load(package.parents[1])) == [problem]


@pytest.mark.parametrize("page", [f"sdk/{name}.md" for name in reference.PAGES])
def test_the_sdks_pages_are_in_the_navigation(page: str):
    assert page in NAVIGATION


# ---------------------------------------------------------------------- of the protocol


@pytest.fixture(scope="module")
def descriptors() -> FileDescriptorSet:
    return protocol.descriptors()


def test_every_service_message_and_enum_is_shown_with_its_comments(descriptors: FileDescriptorSet):
    pages = protocol.pages(descriptors)
    assert sorted(pages) == sorted(proto.stem for proto in (ROOT / "proto/muster/v1").glob("*.proto"))
    for file in descriptors.file:
        if file.package == "muster.v1":
            page = pages[Path(file.name).stem]
            parts = [one.name for part in (file.service, file.message_type, file.enum_type) for one in part]
            for name in parts:
                assert f"\n## {name}\n" in page
            assert f"protocol/{Path(file.name).stem}.md" in NAVIGATION
    assert (
        "| 1 | `OUTCOME_RELEASED` | Every required rank arrived and none voted to fail. |" in pages["common"]
    )
    assert "| 5 | `outcome` | [`Outcome`](common.md#outcome) | What it came to. |" in pages["common"]
    assert "| `Connect` | stream of [`ConnectRequest`](session.md#connectrequest) |" in pages["session"]
    assert "| 1 | `hello` | [`Hello`](session.md#hello), in `message` | Who is speaking" in pages["session"]
    assert "| 6 | `last_sequence` | optional `uint64` |" in pages["common"]


def test_proto_element_without_a_comment_is_refused(descriptors: FileDescriptorSet):
    copy = FileDescriptorSet()
    copy.CopyFrom(descriptors)
    file = next(one for one in copy.file if one.name == "muster/v1/common.proto")
    for place in file.source_code_info.location:
        if list(place.path) == [5, 0, 2, 1]:
            place.leading_comments = ""
    with pytest.raises(
        ValueError, match=r"Outcome\.OUTCOME_RELEASED in proto/muster/v1/common\.proto has no comment"
    ):
        protocol.pages(copy)
