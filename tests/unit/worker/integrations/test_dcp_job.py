"""The example of a job that saves by ``torch.distributed.checkpoint``: which checkpoints it keeps."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from muster.checkpoint.damage import KEPT, Damage
from muster.worker.integrations.commit.lookup import mark_damaged, read

EXAMPLE = runpy.run_path(str(Path(__file__).parents[4] / "examples/dcp_job.py"))
Job: Any = EXAMPLE["Job"]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A single process with its step as its state."""
    for name in ("RANK", "WORLD_SIZE", "MUSTER_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    made = Job.__new__(Job)  # Its network needs a process group.
    made.folder = tmp_path
    monkeypatch.setattr(made, "_state", lambda: {"step": torch.tensor(made.step)})
    return made


def save(job: Any, *steps: int) -> None:
    for step in steps:
        job.step = step
        job.save()


def left(job: Any) -> set[str]:
    return {path.name for path in job.folder.iterdir()}


def test_last_commits_are_kept_whatever_their_steps(job: Any):
    save(job, 150, 200, 100)  # It went back.
    assert left(job) == {"step-200", "step-100"}


def test_damaged_checkpoint_does_not_take_the_place_of_a_whole_one(job: Any):
    assert EXAMPLE["KEEP"] == 2
    save(job, 50, 100)
    path, marker = read(job.folder / "step-50")
    mark_damaged(path, marker, Damage("weights", "flipped"))  # Its folder has changed last.
    save(job, 150)
    assert left(job) == {"step-100", "step-150"}


def test_checkpoint_that_people_keep_stays(job: Any):
    save(job, 50)
    (job.folder / "step-50" / KEPT).touch()
    save(job, 100, 150, 200)
    assert left(job) == {"step-50", "step-150", "step-200"}
