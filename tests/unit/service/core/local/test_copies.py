"""Which checkpoints are kept and persisted, among them what the oracle reaches rarely."""

import pytest

from muster.service.core.vocabulary.local import LocalCheckpoint
from tests.support.keepers.job import Job
from tests.support.keepers.settling import settle


def new_job(replicas: int = 0, persist_to: str = "") -> Job:
    """A job of three nodes with one rank each, which trains."""
    job = Job(["", "", ""], replicas, persist_to)
    for node in job.nodes.values():
        job.connect(node)
        job.verify_all(node)
    job.start([(node, 1) for node in job.nodes.values()], job.nodes.values())
    job.recover()
    assert job.load()
    return job


def work(job: Job, *names: str) -> None:
    """Keepers follow their orders until nothing changes."""
    while any([job.work(job.nodes[name]) for name in names or job.nodes]):
        pass


def save(job: Job) -> LocalCheckpoint:
    """Commit a checkpoint of which no keeper has reported anything yet."""
    checkpoint = job.save()
    job.commit(checkpoint)
    return checkpoint


@pytest.fixture
def behind() -> tuple[Job, LocalCheckpoint]:
    """A job of which one keeper is away for seven saves, and the newest whole checkpoint."""
    job = new_job(replicas=1)
    whole = save(job)
    work(job)
    job.disconnect(job.nodes["k2"])
    for _ in range(7):
        save(job)
        work(job, "k0", "k1")
    assert job.rules.newest_whole() == whole.attempt
    return job, whole


def test_newest_whole_checkpoint_is_kept_however_many_are_newer(behind: tuple[Job, LocalCheckpoint]):
    job, whole = behind
    assert whole.attempt in job.rules.known
    assert len(job.rules.known) == 7, "it, and the six newest"


def test_newest_whole_checkpoint_survives_a_restart_before_its_keepers_are_back(
    behind: tuple[Job, LocalCheckpoint],
):
    job, whole = behind
    job.restart_coordinator()
    job.connect(job.nodes["k0"])
    save(job)
    assert whole.attempt in job.rules.known
    job.connect(job.nodes["k1"])
    assert job.rules.newest_whole() == whole.attempt


def test_restored_checkpoints_are_given_up_when_a_newer_one_is_whole(behind: tuple[Job, LocalCheckpoint]):
    job, whole = behind
    job.restart_coordinator()
    for node in job.nodes.values():
        job.connect(node)
    work(job)
    assert whole.attempt not in job.rules.known
    assert len(job.rules.known) == 2


def test_shared_storage_does_not_go_back_when_parts_of_an_older_checkpoint_return():
    job = new_job(persist_to="/shared")
    older = save(job)
    work(job, "k0", "k1")
    job.disconnect(job.nodes["k2"])
    newer = job.save()
    job.connect(job.nodes["k2"])
    missing = job.nodes["k2"].disk.pop(older.attempt)
    job.commit(newer)
    work(job)
    assert job.rules.committed == {newer.attempt}
    job.nodes["k2"].disk[older.attempt] = missing
    work(job)
    assert job.rules.committed == {newer.attempt}


def test_newest_persisted_checkpoint_is_kept_while_no_newer_one_is_whole():
    job = new_job(persist_to="/shared")
    save(job)
    work(job)
    persisted = save(job)
    work(job)
    job.disconnect(job.nodes["k2"])
    job.nodes["k2"].disk.clear()
    for _ in range(8):
        save(job)
        work(job, "k0", "k1")
    assert persisted.attempt in job.rules.known


def test_copies_stay_where_they_are_when_the_coordinator_restarts():
    job = Job([""] * 6, 1, "")
    for node in job.nodes.values():
        job.connect(node)
        job.verify_all(node)
    job.start([(node, 1) for node in job.nodes.values()], job.nodes.values())
    settle(job)
    job.disconnect(job.nodes["k2"])
    rest = [node for node in job.nodes.values() if node.session is not None]
    job.start([(node, 1) for node in rest], rest)
    job.recover()
    job.load()
    before = save(job)
    work(job)
    places = {node.name: node.reported[before.attempt].ranks for node in rest}
    job.restart_coordinator()
    for node in reversed(rest):
        job.connect(node)
    after = save(job)
    work(job)
    assert {node.name: node.reported[after.attempt].ranks for node in rest} == places
