"""What a queue knows of each of its saves."""

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from muster.worker.decision import Decision
from muster.worker.groups.write_report import WriteReport
from muster.worker.saves.request import AsyncRequest
from muster.worker.saves.writers.callers import Write

EMPTY_REPORT = WriteReport()
"""The report of a save without a known step and size."""


@dataclass(frozen=True, slots=True)
class SaveTimings:
    """Where the time of one save went, in seconds."""

    call_idx: int
    """The number of the call."""
    preload: float
    """Planning, and bringing tensors to the host; the training thread waits."""
    start: float
    """The fork, or handing over to the worker, and what is left of a GPU's copies; the training thread
    waits."""
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


@dataclass(slots=True, eq=False)
class Call:
    """A save that is not finalized: everything about it but its state, which the ledger has.

    It goes from thread to thread with the events and orders about it, and only the thread that has it changes
    it: its caller, then the voter, then the thread that finalizes it.
    """

    owner: object
    """The queue, which must live until the save is decided and cleaned up after; None from then on."""
    request: AsyncRequest
    """The request without the state to write, which may be large and must not be kept until the end."""
    name: str
    """For people; empty until it has its number, if it has no other name."""
    on_written: Callable[[], None] | None = None
    commit: Callable[[Decision], None] | None = None
    on_decided: Callable[[], None] | None = None
    prepared: float = 0.0
    """Seconds that the training thread has waited before the save was scheduled."""
    planned: float = 0.0
    """The last seconds of these: the ranks planned together."""
    report: WriteReport = EMPTY_REPORT
    """The step and the bytes of this rank's part, for people."""
    word: Callable[[], bytes] = bytes
    """Returns what this rank says beside its vote that it has written; empty: nothing."""
    ticket: weakref.ref[Any] | None = None
    """Tells the loop that the caller's frame is gone."""
    idx: int = -1
    """Its number; -1 until it is reserved."""
    write: Write | None = None
    seconds: float = 0.0
    """How long the write took."""
    written: Decision | None = None
    """The release that says that every rank has written."""
    commit_failure: str | None = None
    """Why this rank's commit failed."""
    voted_at: float | None = None
    """When this rank first arrived at the barrier, on the monotonic clock."""
    written_at: float | None = None
    """When it heard that every rank has written."""
    decided_at: float | None = None
    began_at: float = field(default_factory=time.monotonic)
    """When it was scheduled, on the monotonic clock."""
    decision: Decision | None = None
    """The last one: it says whether the save is committed."""

    def number(self, idx: int) -> None:
        """Take a number."""
        self.idx = idx
        self.name = self.name or f"save {idx}"

    @property
    def preload_and_start(self) -> tuple[float, float]:
        """Seconds of bringing the state to the host, and of the write's start; 0 if there is no write."""
        if self.write is None:
            return 0.0, 0.0
        return self.write.preload_seconds, self.write.start_seconds

    def timings(self, finalize: float) -> SaveTimings:
        """Return where its time went.

        Args:
            finalize: seconds of the finalize functions.
        """
        preload, start = self.preload_and_start
        voted = self.voted_at or 0.0
        decided = self.decided_at or voted
        written = self.written_at or decided
        return SaveTimings(
            self.idx,
            self.prepared + preload,
            start,
            self.seconds,
            written - voted,
            decided - written,
            finalize,
        )
