"""Fixtures of the tests of commits."""

from pathlib import Path

import pytest

from muster.worker.integrations.commit import folders
from tests.unit.worker.integrations.commit.folder_jobs import Job


@pytest.fixture(autouse=True)
def _no_unfinished_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_unfinished_loads", set())


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "new" / "job")
