"""What a queue knows of each of its saves."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Thread

from muster.worker.decision import Decision
from muster.worker.errors import MusterError, OutcomeUnknownError
from muster.worker.saves.callers import Write
from muster.worker.saves.failure import save_error
from muster.worker.saves.request import AsyncRequest


@dataclass(frozen=True, slots=True)
class SaveTimings:
    """Where the time of one save went, in seconds."""

    call_idx: int
    """The number of the call."""
    preload: float
    """Planning, and bringing tensors to the host; the training thread waits."""
    start: float
    """The fork, or handing over to the worker; the training thread waits."""
    write: float = 0.0
    """From the start to the end of this rank's write."""
    vote: float = 0.0
    """From this rank's arrival at the barrier to the decision: waiting for the other ranks."""
    commit: float = 0.0
    """Making it a checkpoint, on every rank."""
    finalize: float = 0.0
    """The finalize functions; the training thread waits."""

    @property
    def stall(self) -> float:
        """How long the training thread waited, all in all."""
        return self.preload + self.start + self.finalize


@dataclass(slots=True)
class Call:
    """A save that is not finalized."""

    request: AsyncRequest
    name: str
    """For people."""
    write: Write | None
    timings: SaveTimings
    on_written: Callable[[], None] | None = None
    commit: Callable[[Decision], None] | None = None
    on_decided: Callable[[], None] | None = None
    failure: str | None = None
    """Why it could not be begun."""
    written: bool = False
    """Whether every rank has written."""
    decision: Decision | None = None
    error: MusterError | None = None
    """Why there is no decision."""

    @property
    def decided(self) -> bool:
        """Whether it is known how it ended, or that it is not."""
        return self.decision is not None or self.error is not None

    def failed(self) -> MusterError | None:
        """Why a save that is decided must not be finalized."""
        assert self.decided
        if self.decision is None or self.decision.released:
            return self.error
        return save_error(self.name, self.request.call_idx, self.decision, written=self.written)


@dataclass(slots=True)
class State:
    """The saves of a queue, also after an abort. The queue's lock guards it."""

    calls: deque[Call] = field(default_factory=deque)
    """Not finalized, oldest first."""
    decide: Callable[[], None] | None = None
    """Decides those that are not; None if there are none, so that the thread that calls it holds no queue."""
    unknown: OutcomeUnknownError | None = None
    """Why the oldest of them is not decided: the coordinator has been away for as long as a save may take."""
    closing: bool = False
    decider: Thread | None = None
    """The thread that has claimed to decide. It gives that up when nothing is left to decide and the queue
    closes, or at once if it stands in for a thread that could not be started."""

    @property
    def undecided(self) -> list[Call]:
        """Oldest first."""
        return [call for call in self.calls if not call.decided]
