"""torch's exit barrier: each agent waits there until the workers of all agents have ended, for up to 300 s.

A node that has gone never comes. When the run was stopped on request, the others end the wait without it.
"""

import logging
import threading
import time
from typing import Protocol

from muster.worker.errors import MusterError

logger = logging.getLogger(__name__)

KEY = "torchelastic/agent/terminal_state"
"""The prefix of its keys: ``_TERMINAL_STATE_SYNC_ID`` of ``torch.distributed.elastic.agent.server.api``."""
ARRIVED = f"{KEY}/num_members"
"""The number of agents that wait: ``_NUM_MEMBERS`` of ``torch.distributed.elastic.utils.store``."""
RELEASED = f"{KEY}/last_member"
"""Ends the wait: ``_LAST_MEMBER_CHECKIN`` of the same module."""
POLL_INTERVAL = 0.2
"""Seconds between two looks at how many agents wait."""
TIMEOUT = 300.0
"""Seconds. torch's own wait ends then by default."""


class Keys(Protocol):
    """The store over which the agents meet."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return it."""

    def set(self, key: str, value: str) -> None:
        """Set a value."""


def release_without(gone: int, world_size: int, store: Keys, prefix: str, ended: threading.Event) -> None:
    """Release the exit barrier once all remaining nodes wait at it.

    Args:
        gone: how many nodes have gone.
        world_size: the number of nodes of the round.
        store: the store over which the agents meet, and not one of torch: a thread in the C++ code of those
            aborts the process if the interpreter ends meanwhile.
        prefix: that of the round's keys.
        ended: set when this agent waits no longer.
    """
    deadline = time.monotonic() + TIMEOUT
    try:
        while store.add(f"{prefix}/{ARRIVED}", 0) < world_size - gone:
            if ended.wait(POLL_INTERVAL) or time.monotonic() >= deadline:
                return
        store.set(f"{prefix}/{RELEASED}", "")
    except MusterError as error:
        logger.info("torch's exit barrier may wait for %d nodes that have gone: %s", gone, error)
