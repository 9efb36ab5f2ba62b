"""A keeper uses a manifest, torch's metadata and a part only if they are what was written."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from muster.checkpoint import retry
from muster.checkpoint.directory import METADATA
from muster.checkpoint.manifest import MANIFEST, Manifest, ManifestReference
from muster.keeper.verifying import file_is_whole, read_head
from muster.keeper.vocabulary import Head, UnusableManifestError
from tests.support.expect import raising
from tests.support.keeping.checkpoints import MadeCheckpoint, entry_of, made_checkpoint
from tests.support.saves.damage import flip

PART = "__0_0.distcp"


@pytest.fixture
def made() -> MadeCheckpoint:
    return made_checkpoint(world_size=1)


@pytest.fixture
def folder(tmp_path: Path, made: MadeCheckpoint) -> Path:
    made.write(tmp_path, [0], head=True)
    return tmp_path / made.name


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = [flip, cut, Path.unlink]


# ---------------------------------------------------------------------- a part


def test_file_is_whole_as_it_was_written(folder: Path, made: MadeCheckpoint):
    assert file_is_whole(folder, PART, entry_of(made.files[PART], 0))


@pytest.mark.parametrize("damage", DAMAGES, ids=["flipped", "cut", "removed"])
def test_damaged_file_is_not_whole_and_is_named(
    folder: Path, made: MadeCheckpoint, caplog: pytest.LogCaptureFixture, damage: object
):
    assert callable(damage)
    damage(folder / PART)
    assert not file_is_whole(folder, PART, entry_of(made.files[PART], 0))
    assert f"{folder / PART} is damaged" in caplog.text


def test_file_that_cannot_be_read_is_not_taken_for_damaged(
    folder: Path, made: MadeCheckpoint, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(retry, "DELAYS", ())
    monkeypatch.setattr(os, "preadv", raising(OSError, errno.EIO, os.strerror(errno.EIO)))
    with pytest.raises(OSError, match="Input/output error"):
        file_is_whole(folder, PART, entry_of(made.files[PART], 0))


# ---------------------------------------------------------------------- the head


def test_head_is_read_with_and_without_a_reference(folder: Path, made: MadeCheckpoint):
    reference = ManifestReference.of(made.manifest)
    expected = Head(reference, Manifest.decode(made.manifest))
    assert read_head(folder) == read_head(folder, reference) == expected


def test_manifest_of_another_save_is_no_head(folder: Path):
    other = made_checkpoint(world_size=1, number=1)
    assert read_head(folder, ManifestReference.of(other.manifest)) is None


@pytest.mark.parametrize("name", [MANIFEST, METADATA])
def test_unfinished_head_is_none_and_is_not_worth_a_warning(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
):
    (folder / name).unlink()
    assert read_head(folder) is None
    assert caplog.text == ""


def test_head_of_an_attempt_that_is_not_here_is_none(tmp_path: Path):
    assert read_head(tmp_path / "1-7") is None


@pytest.mark.parametrize("damage", DAMAGES[:2], ids=["flipped", "cut"])
@pytest.mark.parametrize("name", [MANIFEST, METADATA])
def test_damaged_head_is_not_used(
    folder: Path, made: MadeCheckpoint, name: str, damage: object, caplog: pytest.LogCaptureFixture
):
    assert callable(damage)
    damage(folder / name)
    assert read_head(folder, ManifestReference.of(made.manifest)) is None
    assert f"the head in {folder} is not used" in caplog.text


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"files": 7}'])
def test_manifest_that_is_garbage_is_no_head(folder: Path, content: bytes):
    (folder / MANIFEST).write_bytes(content)
    assert read_head(folder) is None


@pytest.mark.parametrize("name", ["../keeper.json", "a/b", ".hidden", MANIFEST])
def test_manifest_that_names_a_file_which_no_rank_writes_is_refused(
    folder: Path, made: MadeCheckpoint, name: str
):
    manifest = Manifest.decode(made.manifest)
    files = {**manifest.files, name: manifest.files[PART]}
    (folder / MANIFEST).write_bytes(replace(manifest, files=files).encode())
    with pytest.raises(UnusableManifestError, match="it names"):
        read_head(folder)


def test_head_that_cannot_be_read_is_not_taken_for_absent(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retry, "DELAYS", ())
    monkeypatch.setattr(os, "preadv", raising(OSError, errno.EIO, os.strerror(errno.EIO)))
    with pytest.raises(OSError, match="Input/output error"):
        read_head(folder)
