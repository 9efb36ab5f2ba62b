"""Names that come from other processes, and heads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.directory import METADATA
from muster.checkpoint.local_folder import attempt_name, find_attempt
from muster.checkpoint.manifest import FileEntry, Manifest, ManifestReference
from muster.keeper.vocabulary import Head, Location, Peers, UnusableManifestError

numbers = st.integers(0, 2**64 - 1)


@given(numbers, numbers)
def test_attempt_is_read_from_its_name(generation: int, number: int):
    attempt = SaveAttempt(generation, number)
    assert find_attempt(attempt_name(attempt)) == attempt


@given(st.text())
def test_name_that_is_read_is_the_only_name_of_its_attempt(name: str):
    attempt = find_attempt(name)
    assert attempt is None or attempt_name(attempt) == name


@pytest.mark.parametrize(
    "name", ["", "1", "1-", "-1", "01-2", "1-02", "1-2-3", "١-٢", " 1-2", "1-2\n", "../1-2"]
)
def test_other_names_are_no_attempts(name: str):
    assert find_attempt(name) is None


def head(*names: str, rank: int | None = 0) -> Head:
    files = {METADATA: FileEntry((), 0), **{name: FileEntry((), rank) for name in names}}
    return Head(ManifestReference(1, ""), Manifest(files))


def test_metadata_belongs_to_the_part_of_no_rank():
    made = head("__0_0.distcp", "__0_1.distcp")
    assert made.parts == {0: {"__0_0.distcp", "__0_1.distcp"}}
    assert made.part(1) == frozenset()


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "/etc/passwd", "..", ".", "", ".hidden", ".notes", "manifest.json", "a\0b"]
)
def test_manifest_with_a_name_that_no_rank_writes_is_refused(name: str):
    with pytest.raises(UnusableManifestError, match="it names"):
        head(name)


def test_manifest_that_names_no_writer_or_no_metadata_is_refused():
    with pytest.raises(UnusableManifestError, match="no file of a rank"):
        head("x", rank=None)
    with pytest.raises(UnusableManifestError, match=r"names no \.metadata"):
        Head(ManifestReference(1, ""), Manifest({}))


def test_keeper_of_a_rank_is_found_among_peers():
    peers = Peers("", (Location("http://a", frozenset({0, 1})), Location("http://b", frozenset({2}))))
    assert [peers.of_rank(rank) for rank in (0, 2, 3)] == ["http://a", "http://b", None]
