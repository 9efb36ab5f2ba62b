"""torch's exit barrier: each agent waits there until the workers of all agents have ended, for up to 300 s.

A node that has gone never comes. When the run was stopped on request, the others end the wait without it.

torch counts the agents that wait, also one that is killed while it waits. So each agent that waits counts
itself again whenever it hears of a departure. A node that has gone cannot count itself among the others.
"""

import logging
import threading
import time
from typing import Protocol

from muster.worker.errors import MusterError
from muster.worker.transport.fork_guard import start_thread

logger = logging.getLogger(__name__)

KEY = "torchelastic/agent/terminal_state"
"""The prefix of its keys: ``_TERMINAL_STATE_SYNC_ID`` of ``torch.distributed.elastic.agent.server.api``."""
ARRIVED = f"{KEY}/num_members"
"""The number of agents that wait: ``_NUM_MEMBERS`` of ``torch.distributed.elastic.utils.store``."""
RELEASED = f"{KEY}/last_member"
"""Ends the wait: ``_LAST_MEMBER_CHECKIN`` of the same module."""
REMAINING = f"{KEY}/muster/waiting_without_"
"""Before a number of nodes that have gone: how many agents wait that know of so many."""
POLL_INTERVAL = 0.2
"""Seconds between two looks at how many agents wait."""
TIMEOUT = 300.0
"""Seconds. torch's own wait ends then by default."""


class Keys(Protocol):
    """The store over which the agents meet."""

    def add(self, key: str, value: int) -> int:
        """Add to a number, which is 0 while the key is not there; return the sum."""

    def get(self, key: str) -> bytes:
        """Return a value."""

    def set(self, key: str, value: str) -> None:
        """Set a value."""


class ExitBarrier:
    """Releases the exit barrier of a stopped run once all remaining nodes wait at it.

    Args:
        store: the store over which the agents meet, and not one of torch: a thread in the C++ code of those
            aborts the process if the interpreter ends meanwhile.
        waits: set when this agent waits at the barrier.
    """

    def __init__(self, store: Keys, waits: threading.Event) -> None:
        self._store = store
        self._waits = waits
        self._ended = threading.Event()
        self._gone = 0
        self._thread: threading.Thread | None = None

    def release_without(self, gone: int, world_size: int, prefix: str) -> None:
        """Release it without the nodes that have gone, on a thread.

        Args:
            gone: how many nodes have gone; a later call may name more.
            world_size: the number of nodes of the round.
            prefix: that of the round's keys.
        """
        self._gone = gone
        if self._thread is None:
            what, name = "torch's exit barrier", "muster-exit-barrier"
            self._thread = start_thread(what, name, self._run, world_size, prefix)

    def end(self) -> None:
        """End the thread, since this agent waits no longer."""
        self._ended.set()

    def _run(self, world_size: int, prefix: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        counted = 0  # The number of departures with which this agent has counted itself.
        try:
            while not self._ended.wait(POLL_INTERVAL) and time.monotonic() < deadline:
                if not self._waits.is_set():
                    continue
                gone = self._gone
                key = f"{prefix}/{REMAINING}{gone}"
                waiting = self._store.add(key, 1) if counted < gone else int(self._store.get(key))
                counted = gone
                if waiting >= world_size - gone:
                    self._store.set(f"{prefix}/{RELEASED}", "")
                    return
        except MusterError as error:
            logger.info("torch's exit barrier may wait for nodes that have gone: %s", error)
