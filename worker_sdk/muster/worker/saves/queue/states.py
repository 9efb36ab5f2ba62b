"""The states of a queue of saves and of a save, and every change of state that can happen."""

from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeAlias

Save: TypeAlias = Any
"""Stands for one save."""
Asker: TypeAlias = Any
"""Stands for a caller that waits for an answer."""


class QueueState(Enum):
    """What a queue does with a new save."""

    OPEN = "open"
    """Takes it."""
    CLOSING = "closing"
    """Refuses it; earlier saves are not decided yet."""
    CLOSED = "closed"
    """Refuses it, for good."""
    INACTIVE = "inactive"
    """Has no group, and takes one for it. So a queue begins, and so it goes on after an abort."""


class SaveState(Enum):
    """How far a save has come on this rank."""

    RESERVED = "reserved"
    """It has its number; its caller still prepares it."""
    WRITING = "writing"
    """Its caller has handed it over; its write, if there is one, has not ended."""
    WRITTEN = "written"
    """Its write has ended, well or not. The ranks vote."""
    DECIDED = "decided"
    """Its outcome is known, or given up as unknown."""
    FINALIZED = "finalized"
    """A caller has taken it, to finalize it or to raise its error."""
    DROPPED = "dropped"
    """An abort has taken it: it is never finalized."""


QUEUE_MOVES: Mapping[QueueState, frozenset[QueueState]] = {
    QueueState.INACTIVE: frozenset({QueueState.OPEN, QueueState.CLOSED}),
    QueueState.OPEN: frozenset({QueueState.CLOSING}),
    QueueState.CLOSING: frozenset({QueueState.CLOSED, QueueState.INACTIVE}),
    QueueState.CLOSED: frozenset(),
}
SAVE_MOVES: Mapping[SaveState, frozenset[SaveState]] = {
    SaveState.RESERVED: frozenset({SaveState.WRITING, SaveState.WRITTEN}),
    SaveState.WRITING: frozenset({SaveState.WRITTEN}),
    SaveState.WRITTEN: frozenset({SaveState.DECIDED}),
    SaveState.DECIDED: frozenset({SaveState.FINALIZED, SaveState.DROPPED}),
    SaveState.FINALIZED: frozenset(),
    SaveState.DROPPED: frozenset(),
}
