"""What must come of a job with local checkpoints when all its nodes are there for long enough."""

from tests.support.expect import of_kind
from tests.support.keepers.job import Job


def settle(job: Job) -> None:
    """Let the job resume and save, and check that it uses what is there, and is as safe as it asked for."""
    for node in job.nodes.values():
        if node.session is None:
            job.connect(node)
        job.attach(node)
        job.verify_all(node)
    for _ in range(2):
        for node in job.nodes.values():
            job.work(node)
            job.verify_all(node)
    _resume(job)
    checkpoint = job.save()
    job.commit(checkpoint, job.least)
    for _ in range(20):
        if not any([job.work(node) for node in job.nodes.values()]):
            break
    else:
        raise AssertionError("keepers never come to rest")
    kept = of_kind(type(job.rules.known[checkpoint.attempt]), job.rules.known[checkpoint.attempt])
    assert kept.level >= job.least, f"it is {kept.level.name}, and {job.least.name} was asked for"
    assert not job.waits_for(checkpoint), "the commit waits in vain"


def _resume(job: Job) -> None:
    if job.is_training:
        return
    newest = job.rules.newest_on_disks(job.nodes.values())
    for _ in range(2 + len(job.rules.known) * 2):
        job.recover()
        if job.load():
            break
    else:
        raise AssertionError("the job does not come back")
    found = job.resumed
    assert found is None or found.attempt >= newest, "a part on a disk was not used"
