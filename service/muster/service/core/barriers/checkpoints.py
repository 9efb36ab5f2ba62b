"""The saves of a run as its ranks report them: the newest checkpoint, the usual interval, the failed saves.

This informs people, by invariant 24 (telemetry decides nothing): a group hands its decisions in and reads
nothing back.
"""

from collections.abc import Collection
from dataclasses import replace

from muster.service.core.barriers.barrier import OpenBarrier
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.effects import Effects
from muster.service.core.vocabulary.events import WriteReport
from muster.service.core.vocabulary.model import (
    Checkpoint,
    CheckpointHistory,
    Decision,
    FailedSave,
    Outcome,
    SlowestWrite,
)
from muster.service.core.vocabulary.records import CheckpointsRecord

MAX_FAILURES = 5
"""Number of failed saves that a run keeps."""
MAX_INTERVALS = 5
"""Number of intervals that a run keeps. Two long pauses among them do not move their median."""


class Checkpoints:
    """Keeps the save history of one run.

    Args:
        run_id: the run.
    """

    def __init__(self, run_id: str) -> None:
        self.history = CheckpointHistory()
        self._run_id = run_id
        self._last_commits: dict[str, float] = {}
        """Last commit of each group, in seconds since 1970. After a restart, only that of the newest."""

    def restore(self, record: CheckpointsRecord) -> None:
        """Restore the history."""
        self.history = record.history
        if (newest := record.history.newest) is not None:
            self._last_commits[newest.prefix] = newest.committed_at

    def record_decision(self, decision: Decision, why: str, barrier: OpenBarrier, effects: Effects) -> None:
        """Record that a barrier of a save was decided: a commit, a failed save, or neither.

        Args:
            decision: the decision.
            why: its reason, for people.
            barrier: the barrier, with the reports of its ranks.
            effects: receives the new record.
        """
        reports = barrier.reports
        quitters = [rank for rank, one in reports.items() if one.gives_up]
        if decision.outcome is not Outcome.RELEASED:
            self._add_failure(decision, why, reports.values())
        elif quitters:
            self._add_failure(decision, report.given_up(quitters), reports.values())
        elif len(reports) == len(barrier.arrivals) and all(one.commits for one in reports.values()):
            self._add_commit(decision, barrier)
        else:
            return
        effects.records.append(CheckpointsRecord(self._run_id, self.history))

    def _add_failure(self, decision: Decision, why: str, reports: Collection[WriteReport]) -> None:
        reason = report.save_failed(
            why, decision.outcome, decision.arrived, decision.required, decision.missing
        )
        failed = FailedSave(_step(reports), decision.decided_at, reason, decision.prefix, decision.sequence)
        failures = (failed, *self.history.failures)[:MAX_FAILURES]
        self.history = replace(self.history, failures=failures)

    def _add_commit(self, decision: Decision, barrier: OpenBarrier) -> None:
        reports = barrier.reports
        sizes = [one.bytes for one in reports.values() if one.bytes is not None]
        times = [(one.seconds, rank) for rank, one in reports.items() if one.seconds is not None]
        slowest = None
        if times:
            seconds, rank = max(times)
            slowest = SlowestWrite(rank, barrier.arrivals[rank].host, seconds)
        intervals = self.history.intervals
        last = self._last_commits.get(decision.prefix)
        if last is not None:
            # The wall clock may have been set back.
            intervals = (*intervals, max(0.0, decision.decided_at - last))[-MAX_INTERVALS:]
        self._last_commits[decision.prefix] = decision.decided_at
        self.history = replace(
            self.history,
            newest=Checkpoint(
                _step(reports.values()),
                decision.decided_at,
                sum(sizes) if sizes else None,
                slowest,
                decision.prefix,
                decision.sequence,
            ),
            committed=self.history.committed + 1,
            intervals=intervals,
        )


def _step(reports: Collection[WriteReport]) -> int | None:
    """Return the step of a save; None if no rank reports one, or ranks report different ones."""
    steps = {one.step for one in reports if one.step is not None}
    return steps.pop() if len(steps) == 1 else None
