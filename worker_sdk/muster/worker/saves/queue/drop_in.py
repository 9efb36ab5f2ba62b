"""A function that nvidia-resiliency-ext has beside its queue, under the same name."""

import logging

from muster.worker.saves.queue.queue import AsyncCallsQueue

logger = logging.getLogger(__name__)


def abort_nvrx_checkpoint() -> None:
    """Abort the saves of all queues of this process, under nvidia-resiliency-ext's name.

    Each running write is killed, and its save fails on all ranks; no save is finalized. The log says what
    became of each save. The queues accept new saves, unless the outcome of an earlier one is unknown.
    """
    for queue in AsyncCallsQueue.get_instances():
        try:
            queue.close(abort=True)
        except Exception as error:
            logger.warning("%s", error)
