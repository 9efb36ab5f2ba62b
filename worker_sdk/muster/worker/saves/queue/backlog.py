"""How many saves one rank may have under way."""

import logging
from collections.abc import Callable
from time import sleep

from muster.worker.errors import MusterError

logger = logging.getLogger(__name__)

MAX_UNDER_WAY = 2
"""Saves that may be written at the same time. They share the storage's bandwidth, and each has a child with
the state's memory: if more and more of them begin, none ends."""
MAX_UNDECIDED = 8
"""Each save takes room on the storage until it is decided, and without the coordinator none is."""
PACE = 0.05
"""Seconds between two looks whether a save is decided."""


class BacklogError(MusterError):
    """Too many saves wait for a coordinator that is away."""


def wait_for_earlier(undecided: Callable[[], int], has_contact: Callable[[], bool]) -> None:
    """Wait until fewer than :data:`MAX_UNDER_WAY` saves are undecided.

    Without contact to the coordinator none is decided: then it returns, and :func:`check_backlog` applies.

    Args:
        undecided: returns how many of this rank's saves are not decided.
        has_contact: returns whether this rank is connected with the coordinator.
    """
    waits = False
    while undecided() >= MAX_UNDER_WAY and has_contact():
        if not waits:
            waits = True
            logger.warning(
                "the next save waits for an earlier one: %d are under way. Storage is too slow for this many "
                "saves, or a rank does not write. Save less often, or to faster storage.",
                MAX_UNDER_WAY,
            )
        sleep(PACE)


def check_backlog(undecided: int, *, has_contact: bool) -> None:
    """Refuse one more save while the coordinator is away and :data:`MAX_UNDECIDED` or more wait for it.

    Args:
        undecided: how many of this rank's saves are not decided.
        has_contact: whether this rank is connected with the coordinator.

    Raises:
        BacklogError: there are too many.
    """
    if undecided >= MAX_UNDECIDED and not has_contact:
        raise BacklogError(
            f"the coordinator is away, and {MAX_UNDECIDED} saves or more wait for its decision. They take "
            "room on the storage until it is back"
        )
