"""How many saves one rank may have under way."""

import logging
from collections.abc import Callable
from time import monotonic, sleep

from muster.worker.errors import MusterError

logger = logging.getLogger(__name__)

MAX_UNDER_WAY = 2
"""Undecided saves beside which training goes on. They share the storage's bandwidth, and each has a child
with the state's memory: if more and more of them begin, none ends."""
MAX_UNDECIDED = 8
"""Undecided saves beside which no further one begins: each takes room on the storage until it is decided."""
MAX_WAIT = 120.0
"""Seconds that one save waits for others at most. A signal handler that saves may have interrupted a thread
that holds a lock; if the thread that decides saves needs it, none is decided before the handler returns."""
POLL_INTERVAL = 0.05
"""Seconds between two looks whether a save is decided."""


class BacklogError(MusterError):
    """Too many saves are undecided."""


def wait_until_few(undecided: Callable[[], int], has_contact: Callable[[], bool]) -> None:
    """Wait until at most :data:`MAX_UNDER_WAY` saves are undecided, for :data:`MAX_WAIT` at most.

    Without contact to the coordinator none is decided, so it does not wait.

    Args:
        undecided: returns how many of this rank's saves are not decided.
        has_contact: returns whether this rank is connected with the coordinator.
    """
    began, warned = monotonic(), False
    while (count := undecided()) > MAX_UNDER_WAY and has_contact() and monotonic() - began < MAX_WAIT:
        if not warned:
            warned = True
            logger.warning(
                "training waits in save(): %d saves are not decided. Storage or copies are too slow for this "
                "many saves, a rank does not write, or the coordinator was away. Save less often, or to "
                "faster storage.",
                count,
            )
        sleep(POLL_INTERVAL)
    if warned:
        logger.warning("training has waited in save() for %.1f s", monotonic() - began)


def check_backlog(undecided: int, *, has_contact: bool) -> None:
    """Refuse one more save if :data:`MAX_UNDECIDED` or more are undecided.

    Args:
        undecided: how many of this rank's saves are not decided.
        has_contact: whether this rank is connected with the coordinator.

    Raises:
        BacklogError: there are too many.
    """
    if undecided < MAX_UNDECIDED:
        return
    if has_contact:
        raise BacklogError(
            f"{MAX_UNDECIDED} saves or more are not decided: storage or copies are too slow for this many, "
            "or a rank does not write"
        )
    raise BacklogError(
        f"the coordinator is away, and {MAX_UNDECIDED} saves or more wait for its decision. They take "
        "room on the storage until it is back"
    )
