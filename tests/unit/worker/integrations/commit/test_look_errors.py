"""A path that cannot be looked at is not taken for absent: nothing is replaced, renamed or removed for it."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.checkpoint.manifest import Manifest
from muster.checkpoint.source import beside
from muster.worker.integrations.commit.cleanup import finish, remove, restore
from muster.worker.integrations.commit.lookup import Marker, read, replaced_name
from muster.worker.integrations.commit.staged_checkpoint import StagedCheckpoint, check_name
from tests.support.crashes.stat_faults import StatFaults

BROKEN = os.strerror(errno.EIO)


def staged_file(path: Path, content: str, number: int) -> StagedCheckpoint:
    staged = StagedCheckpoint(path, 0, number, "job", within=path.name)
    staged.prepare()
    staged.unfinished.parent.mkdir()
    staged.unfinished.write_text(content)
    return staged


def commit(staged: StagedCheckpoint, sequence: int) -> None:
    staged.commit(Marker("job", 0, 1, "checkpoint/test", sequence), Manifest({}))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A committed checkpoint that is a file."""
    commit(staged_file(tmp_path / "last", "one", 1), 1)
    return tmp_path / "last"


def below(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_commit_of_a_file_does_not_keep_the_description_of_the_old_one(
    file: Path, monkeypatch: pytest.MonkeyPatch
):
    staged = staged_file(file, "two", 2)
    with monkeypatch.context() as patched:
        faults = StatFaults(patched, beside(file), times=1, links_only=True)
        commit(staged, 2)
    assert faults.struck == 1
    assert (file.read_text(), read(file)[1].sequence) == ("two", 2)


def test_commit_of_a_file_fails_if_the_old_description_cannot_be_looked_at(
    file: Path, monkeypatch: pytest.MonkeyPatch
):
    staged = staged_file(file, "two", 2)
    with monkeypatch.context() as patched:
        StatFaults(patched, beside(file), links_only=True)
        with pytest.raises(OSError, match=BROKEN):
            commit(staged, 2)
    assert (file.read_text(), read(file)[1].sequence) == ("one", 1)


@pytest.mark.parametrize("act", [finish, remove])
def test_description_that_cannot_be_looked_at_is_not_taken_for_absent(
    file: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], None]
):
    before = below(file.parent)
    with monkeypatch.context() as patched:
        StatFaults(patched, beside(file), links_only=True)
        with pytest.raises(OSError, match=BROKEN):
            act(file)
    assert below(file.parent) == before


def test_name_that_cannot_be_looked_at_is_not_taken_for_free(file: Path, monkeypatch: pytest.MonkeyPatch):
    folder = StagedCheckpoint(file.with_name("best"), 0, 3, "job")
    folder.begin()
    commit(folder, 3)
    folder.path.rename(replaced_name(folder.path))
    folder.path.mkdir()  # Another program's.
    with monkeypatch.context() as patched:
        StatFaults(patched, folder.path, links_only=True)
        with pytest.raises(OSError, match=BROKEN):
            restore(file.parent)
    assert (folder.path.is_dir(), read(folder.path)[0]) == (True, replaced_name(folder.path))


def test_folder_that_cannot_be_looked_at_at_first_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").touch()
    faults = StatFaults(monkeypatch, tmp_path / "data", times=1)
    with pytest.raises(IsADirectoryError, match="data is a folder, and no checkpoint"):
        check_name(tmp_path / "data")
    assert faults.struck == 1
