"""What a ledger of saves wants done: answers to callers, and orders to the threads of the queue."""

from dataclasses import dataclass
from threading import Thread
from typing import TypeAlias

from muster.worker.errors import MusterError
from muster.worker.saves.queue.events import CheckOpen, Reserve
from muster.worker.saves.queue.states import Asker, QueueState, Save

# ---------------------------------------------------------------------- answers


@dataclass(frozen=True, slots=True)
class View:
    """How a queue stands."""

    state: QueueState
    next_idx: int
    """The number of the next save."""
    ready: int
    """How many saves, from the oldest on, are decided."""
    unfinalized: int
    """How many are neither finalized nor dropped."""

    @property
    def undecided(self) -> int:
        """How many there are from the oldest undecided one to the newest."""
        return self.unfinalized - self.ready


@dataclass(frozen=True, slots=True)
class DecidedSave:
    """A save that is decided."""

    save: Save
    error: MusterError | None
    """Why it must not be finalized."""


@dataclass(frozen=True, slots=True)
class QueueEnded:
    """A queue has ended."""

    dropped: tuple[DecidedSave, ...]
    """The saves that an abort has dropped, oldest first."""
    error: BaseException | None = None
    """Why the writers could not be released."""
    thread: Thread | None = None
    """The thread that has closed the queue, and is about to end."""


# ---------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Answer:
    """Give a caller its answer. An exception is raised there."""

    asker: Asker
    value: object


@dataclass(frozen=True, slots=True)
class Reserved:
    """Tell a save and its caller the save's number."""

    save: Save
    idx: int
    asker: Asker


@dataclass(frozen=True, slots=True)
class Reopen:
    """Take the group, then hand in :class:`Reopened` and the question again; or refuse the question."""

    question: Reserve | CheckOpen


@dataclass(frozen=True, slots=True)
class EndWrite:
    """Kill a save's writer, if it has one."""

    save: Save
    reason: str


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for the end of a save's write; then its memory may be used again."""

    save: Save


@dataclass(frozen=True, slots=True)
class Vote:
    """Vote on a save, and on its commit if every rank has written."""

    save: Save
    failure: str | None
    """Why this rank's write failed."""
    since_abort: int | None
    """How many saves came before it since the last abort; None before any."""


@dataclass(frozen=True, slots=True)
class Clean:
    """Clean up after a save that is decided."""

    save: Save


@dataclass(frozen=True, slots=True)
class RetireGroup:
    """The group may never take another save: this rank gives up a save whose outcome it does not know."""

    save: Save


@dataclass(frozen=True, slots=True)
class ReleaseQueue:
    """Release the writers and the group, and tell the callers that wait for it."""

    askers: tuple[Asker, ...]
    dropped: tuple[DecidedSave, ...]
    """The saves that an abort has dropped, oldest first."""
    forgotten: bool
    """Whether nobody holds the queue. Then wait for nothing."""


Order: TypeAlias = Await | Vote | Clean
"""An order to the voter, which has one at a time, and answers each by one event."""
Effect: TypeAlias = Answer | Reserved | Reopen | EndWrite | RetireGroup | ReleaseQueue | Order
