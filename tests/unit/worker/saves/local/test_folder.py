"""The keeper's folder, as a rank makes it."""

import errno
import os
from pathlib import Path

import pytest

from muster.checkpoint.local_folder import REQUEST
from muster.worker.saves.local.folder import LocalFolder
from tests.support.expect import raising


def test_folder_belongs_to_its_user_alone(tmp_path: Path):
    before = os.umask(0o022)
    try:
        folder = LocalFolder(tmp_path / "local", "job")
        folder.make()
    finally:
        os.umask(before)
    assert folder.path.stat().st_mode & 0o777 == 0o700


def test_folder_that_is_there_is_used_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = LocalFolder(tmp_path, "job")
    folder.make()
    assert (folder.path / REQUEST).read_text() == "job"
    monkeypatch.setattr(Path, "write_text", raising(OSError, errno.ENOSPC, "No space left on device"))
    folder.make()
