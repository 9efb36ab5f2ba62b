"""A name that another process sent leads to nothing outside of the folder."""

import errno
import os
from pathlib import Path

import pytest

from muster.checkpoint.containment import check_name, followed, path_in
from tests.support.crashes.stat_faults import StatFaults


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    folder = tmp_path / "folder"
    (folder / "step-1").mkdir(parents=True)
    (folder / "inside").symlink_to("step-1")
    (folder / "out").symlink_to(tmp_path / "outside")
    return folder


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "a\0b"])
def test_name_with_a_separator_or_no_name_is_refused(name: str):
    with pytest.raises(ValueError, match="that is no name in a folder"):
        check_name(name)


def test_link_that_leads_out_of_the_folder_is_refused(folder: Path):
    for name in ("step-1", "inside", "missing"):
        assert path_in(folder, name) == folder / name
    with pytest.raises(ValueError, match="outside of its folder"):
        path_in(folder, "out")


def test_link_that_cannot_be_looked_at_at_first_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    faults = StatFaults(monkeypatch, folder / "out", times=1)
    with pytest.raises(ValueError, match="outside of its folder"):
        path_in(folder, "out")
    assert faults.struck == 1


def test_link_that_cannot_be_looked_at_is_not_taken_for_a_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    StatFaults(monkeypatch, folder / "out")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        path_in(folder, "out")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        followed(folder / "out")


def test_followed_path_stays_when_the_link_is_moved(folder: Path):
    assert followed(folder / "inside") == folder / "step-1"
    assert followed(folder / "inside" / "..") == folder
    assert followed(folder / "missing") == folder / "missing"
