"""What happens to a queue of saves: the events that its ledger takes in."""

from dataclasses import dataclass
from typing import TypeAlias

from muster.worker.errors import MusterError, OutcomeUnknownError
from muster.worker.saves.queue.states import Asker, Save

# ---------------------------------------------------------------------- from callers


@dataclass(frozen=True, slots=True)
class Reserve:
    """A caller begins a save."""

    save: Save
    thread: int
    """The caller's. A thread that begins a save no longer prepares an earlier one."""
    asker: Asker


@dataclass(frozen=True, slots=True)
class WriteStarted:
    """The caller has started the save's write, or the save has no write."""

    save: Save


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The caller cannot go on with the save. It says so, or its frame is gone.

    It is stale, and changes nothing, once the save is filled or if it was never reserved.
    """

    save: Save
    reason: str


@dataclass(frozen=True, slots=True)
class CheckOpen:
    """Does the queue take saves? An aborted one opens again."""

    asker: Asker


@dataclass(frozen=True, slots=True)
class GetView:
    """How does the queue stand?"""

    asker: Asker


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until every save is decided, except one that this thread itself prepares."""

    thread: int
    asker: Asker


@dataclass(frozen=True, slots=True)
class Take:
    """Take the oldest save, if it is decided."""

    asker: Asker


@dataclass(frozen=True, slots=True)
class EndWrites:
    """End every write that is under way."""

    reason: str


@dataclass(frozen=True, slots=True)
class Close:
    """Take no further saves, and end when all are decided."""

    thread: int
    """The caller's, which no longer prepares a save."""
    asker: Asker
    """Waits for the end."""


@dataclass(frozen=True, slots=True)
class Abort:
    """End every write, finalize nothing, and open again for the next save unless the queue was closed."""

    reason: str
    asker: Asker
    """Waits for the end."""


@dataclass(frozen=True, slots=True)
class Forget:
    """Nobody holds the queue any more."""


# ---------------------------------------------------------------------- from the two threads


@dataclass(frozen=True, slots=True)
class Reopened:
    """The queue has its group."""


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """The answer to :class:`Await`."""

    save: Save
    failure: str | None


@dataclass(frozen=True, slots=True)
class Decided:
    """An answer to :class:`Vote`."""

    save: Save
    error: MusterError | None
    """None: every rank has written, and the commit succeeded on every rank."""


@dataclass(frozen=True, slots=True)
class OutcomeUnknown:
    """The other answer to :class:`Vote`: the coordinator was away for as long as a save may take."""

    save: Save
    error: OutcomeUnknownError


@dataclass(frozen=True, slots=True)
class Cleaned:
    """The answer to :class:`Clean`."""

    save: Save


Question: TypeAlias = Reserve | CheckOpen | GetView | Wait | Take | Abort
Event: TypeAlias = (
    Question
    | WriteStarted
    | Abandoned
    | EndWrites
    | Close
    | Forget
    | Reopened
    | WriteEnded
    | Decided
    | OutcomeUnknown
    | Cleaned
)
