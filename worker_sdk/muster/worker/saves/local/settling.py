"""Makes sure what became of checkpoints that a process was permitted to commit in shared storage."""

import logging
from collections.abc import Iterable

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.manifest import ManifestReference
from muster.v1 import local_pb2 as pb
from muster.worker.saves.storage.checkpoint_storage import CheckpointStorage

logger = logging.getLogger(__name__)


def settle(storage: CheckpointStorage, folder: str, checkpoints: Iterable[pb.LocalCheckpoint]) -> list[bool]:
    """Make sure that each checkpoint is committed, or never will be.

    Args:
        storage: the job's.
        folder: its name, as keepers are told it.
        checkpoints: from the newest to the oldest.

    Returns:
        Whether each is committed there. One that goes elsewhere is not.

    Raises:
        OSError: it cannot be made sure of.
    """
    found = []
    for one in checkpoints:
        attempt = SaveAttempt(one.attempt.generation, one.attempt.number)
        manifest = ManifestReference(one.manifest_size, one.manifest_digest.hex())
        is_there = one.persist_to == folder and storage.settle(one.step, attempt, manifest)
        state = "is" if is_there else "is not, and will not be,"
        logger.info("step %d of attempt %d-%d %s in %s", one.step, *attempt, state, folder)
        found.append(is_there)
    return found
