"""Jobs that resume from their nodes' disks: real ranks, keepers and coordinator."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.processes.coordinator import Coordinator
from tests.support.saves.local_ranks import LocalJob, local_job


@pytest.fixture
def job(tmp_path: Path, coordinator: Coordinator) -> Iterator[LocalJob]:
    """A job of three nodes."""
    with local_job(tmp_path, coordinator.endpoint, 3) as made:
        yield made


def test_job_resumes_without_shared_storage_after_a_node_and_its_disk_are_lost(job: LocalJob):
    assert job.begin(per_node=2) == [None] * 6
    assert job.all("resume") == [None] * 6
    job.save(1, 2)
    job.save(3, wait_for="replicated")
    job.kill()
    job.kill_keepers()
    job.nodes[1].lose()
    if job.shared.exists():
        job.shared.rename(job.folder / "away")
    assert job.begin(per_node=2) == [None] * 6
    assert job.all("resume") == [(3, True)] * 6
    assert not job.shared.exists()
