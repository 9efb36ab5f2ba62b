"""A folder of checkpoints, as a ``Checkpointer`` uses it."""

import errno
import os
from pathlib import Path

import pytest

from muster.worker.saves.storage.folder_storage import FolderStorage
from tests.support.crashes.stat_faults import StatFaults


@pytest.fixture
def storage(tmp_path: Path) -> FolderStorage:
    return FolderStorage(tmp_path, "job")


def test_folder_of_another_program_is_not_replaced(storage: FolderStorage, tmp_path: Path):
    path = tmp_path / "step-0000000001"
    assert storage.committed(1) is None
    path.mkdir()
    assert storage.committed(1) == path


def test_step_that_cannot_be_looked_at_is_not_taken_for_absent(
    storage: FolderStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "step-0000000001"
    path.mkdir()
    with monkeypatch.context() as patched:
        StatFaults(patched, path, times=1)
        assert storage.committed(1) == path
    StatFaults(monkeypatch, path)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        storage.committed(1)
