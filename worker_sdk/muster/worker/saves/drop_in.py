"""The queues of this process, and their end under nvidia-resiliency-ext's name."""

import logging
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from muster.worker.saves.queue import AsyncCallsQueue

logger = logging.getLogger(__name__)

made: WeakSet["AsyncCallsQueue"] = WeakSet()
"""The queues that somebody holds."""


def abort_nvrx_checkpoint() -> None:
    """Abort the saves of all queues of this process, under nvidia-resiliency-ext's name.

    Writes that are under way are ended, and their saves fail, for all ranks; nothing is finalized. What
    became of them is in the log. The queues go on with the next save that is scheduled, unless the outcome
    of one is not known.
    """
    for queue in list(made):
        try:
            queue.close(abort=True)
        except Exception as error:
            logger.warning("%s", error)
