"""The order in which checkpoints are copied to shared storage. One without progress gives its turn up."""

from collections.abc import Sequence

from muster.service.core.local.copies import Copies
from muster.service.core.local.selection import next_to_persist
from muster.service.core.vocabulary.effects import Notice
from muster.service.core.vocabulary.local import Attempt

PERSIST_PATIENCE = 900.0
"""Seconds without progress after which a checkpoint is not persisted, if a newer one waits for its turn."""


class PersistTurns:
    """Gives the turns of one run."""

    def __init__(self) -> None:
        self._progress: tuple[tuple[Attempt, int], float] | None = None
        """How far the checkpoint is that has its turn, and since when, on the monotonic clock."""

    def next(self, copies: Sequence[Copies], now: float, notices: list[Notice], run_id: str) -> Copies | None:
        """Return the checkpoint that keepers are to persist; None: none.

        Args:
            copies: the checkpoints of the run, from the oldest to the newest.
            now: seconds, on the monotonic clock.
            notices: gets a notice about each that gives its turn up.
            run_id: the run.
        """
        while (persisting := next_to_persist(copies)) is not None:
            reached = persisting.attempt, len(persisting.persisted)
            if self._progress is None or self._progress[0] != reached:
                self._progress = reached, now
            newer = (one for one in copies if one.attempt > persisting.attempt)
            if now < self._progress[1] + PERSIST_PATIENCE or not any(
                one.is_wanted_in_shared_storage for one in newer
            ):
                return persisting
            persisting.is_given_up = True
            step = persisting.checkpoint.step
            why = (
                f"step {step} is not persisted: shared storage took nothing of it for {PERSIST_PATIENCE:g} s"
            )
            notices.append(Notice("checkpoint.given_up", run_id, why))
        self._progress = None
        return None

    def due(self, now: float) -> float | None:
        """Return when the turn may go to the next checkpoint, on the monotonic clock; None: never.

        Args:
            now: seconds, on the same clock.
        """
        until = None if self._progress is None else self._progress[1] + PERSIST_PATIENCE
        return until if until is not None and now < until else None
