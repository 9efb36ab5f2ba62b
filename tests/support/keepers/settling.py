"""What must come of a job with local checkpoints when all its nodes are there for long enough."""

from muster.service.core.vocabulary.local import Attempt, LocalCheckpoint
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
    newest = _newest_on_disks(job)
    for _ in range(2 + len(job.rules.known) * 2):
        job.recover()
        if job.load():
            break
    else:
        raise AssertionError("the job does not come back")
    found = job.resumed
    assert newest is None or found is None or found.attempt >= newest, "a part on a disk was not used"


def _newest_on_disks(job: Job) -> Attempt | None:
    """Return the newest checkpoint with each part whole on a disk, and the manifest beside one of them."""

    def is_there(checkpoint: LocalCheckpoint) -> bool:
        found = [node.disk.get(checkpoint.attempt) for node in job.nodes.values()]
        here = [one for one in found if one is not None and one.digest == checkpoint.manifest_digest]
        parts = {rank for one in here for rank, is_intact in one.parts.items() if is_intact}
        has_manifest = any(one.has_head and any(one.parts.values()) for one in here)
        return has_manifest and parts == set(range(checkpoint.world_size))

    known = (one.checkpoint for one in job.rules.known.values())
    return max((one.attempt for one in known if is_there(one)), default=None)
