"""How runs are removed: unused ones after their retention time, and others on an operator's request."""

import math

from muster.service.core.retention.retention import (
    MAX_RUNS_PER_REVIEW,
    REVIEW_PAUSE,
    USE_RECORD_INTERVAL,
    Retention,
)
from muster.service.core.run import Run
from muster.service.core.timers import Timers
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.effects import Effects, Notice
from muster.service.core.vocabulary.model import Instant
from muster.service.core.vocabulary.records import ForgetRun
from muster.service.core.vocabulary.refusal import Reason, Refusal


class RunReaper:
    """Reviews runs when they may be due, and removes them.

    Args:
        runs: all of the coordinator's, by id.
        retention: how long unused runs are kept.
        coming_back: seconds that processes may take to reconnect after a restart.
    """

    def __init__(self, runs: dict[str, Run], retention: Retention, reconnect_time: float) -> None:
        self._runs = runs
        self._reconnect_time = reconnect_time
        self._retention = retention
        self._reviews: Timers[Run] = Timers()
        """When to review each run."""
        self._next_review_at = -math.inf
        """No review before this time."""
        self._serving_since = -math.inf
        """When the coordinator started to serve."""
        self._restored: set[Run] = set()
        """The runs that it restored then."""

    def restore(self, now: Instant) -> None:
        """Plan the review of each restored run."""
        self._restored = set(self._runs.values())
        for run in self._runs.values():
            # A record of an older version lacks the time of the last use, so write it soon.
            self._reviews.arm(
                run, self._retention.due(run) if run.recorded_use is not None else now.monotonic
            )

    def serve(self, now: Instant) -> None:
        """Start to serve: callers can reconnect from now on."""
        self._serving_since = now.monotonic

    def next_time(self) -> float | None:
        """Return the time of the next review, on the monotonic clock."""
        review = self._reviews.next_time()
        return None if review is None else max(review, self._next_review_at)

    def mark_used(self, run: Run | None, now: Instant, effects: Effects) -> None:
        """Restart the retention time of a run, because it was used."""
        if run is None or self._runs.get(run.run_id) is not run:
            return
        run.last_used = now
        if run.recorded_use is None or now.monotonic - run.recorded_use.monotonic >= USE_RECORD_INTERVAL:
            run.write_record(now, effects)
        self.review_in_time(run)

    def review_in_time(self, run: Run | None) -> None:
        """Plan the review of a run for the end of its retention time."""
        if run is not None:
            self._reviews.arm(run, self._retention.due(run))

    def review(self, now: Instant, effects: Effects) -> None:
        """Remove runs after their retention time, at most ``MAX_RUNS_PER_REVIEW`` in one step."""
        if now.monotonic < self._next_review_at:
            return
        runs = self._reviews.pop_due(now.monotonic, MAX_RUNS_PER_REVIEW)
        if len(runs) == MAX_RUNS_PER_REVIEW:
            self._next_review_at = now.monotonic + REVIEW_PAUSE
        for run in runs:
            if run.recorded_use is None:
                run.write_record(now, effects)
            if now.monotonic < self._retention.due(run):
                self.review_in_time(run)
            elif not run.in_use:
                kept = self._retention.of(run)
                self.forget(run, effects, report.run_forgotten(run.run_id, run.closed is not None, kept))
            # A run in use is reviewed again when that use ends.

    def find_reclaimable(self, now: Instant) -> Run | None:
        """Return the closed run that was unused for longest; a new run may take its place."""
        finished = (run for run in self._runs.values() if self.is_reclaimable(run, now))
        return min(finished, key=lambda run: run.last_used.monotonic, default=None)

    def is_reclaimable(self, run: Run, now: Instant) -> bool:
        """Whether a new run may take the place of this one.

        The run is closed and has a retention time. It was unused for ``USE_RECORD_INTERVAL``, so that clients
        could reconnect after a restart, and clients that call now and then did call.
        """
        unused = not run.in_use and self.unused_from(run) <= now.monotonic
        return run.closed is not None and self._retention.closed > 0 and unused

    def unused_from(self, run: Run) -> float:
        """Return from when a run counts as unused, on the monotonic clock, if nobody uses it.

        That is ``USE_RECORD_INTERVAL`` after its last use. After a restart, all clients could reconnect.
        """
        return max(run.last_used.monotonic, self._serving_since) + USE_RECORD_INTERVAL

    def check_unused(self, run: Run, now: Instant) -> None:
        """Refuse to remove a run that is in use, or may be: after a restart, clients need time to reconnect.

        Raises:
            Refusal: RUN_IN_USE.
        """
        if run.in_use:
            processes = sum(process.state.living for process in run.roster)
            users = report.users(processes, len(run.rendezvous), len(run.store.waiters))
            raise Refusal(
                Reason.RUN_IN_USE,
                f"run {run.run_id} is in use: {users}. End the job first; or forget the run all the same, "
                "which ends all that waits for it: --force.",
            )
        left = self._serving_since + self._reconnect_time - now.monotonic
        if left > 0 and run in self._restored:
            raise Refusal(
                Reason.RUN_IN_USE,
                f"whether run {run.run_id} is in use is not known yet: the coordinator has just begun. Ask "
                f"again in {report.seconds(left)}; or forget the run all the same: --force.",
            )

    def forget(self, run: Run, effects: Effects, message: str) -> None:
        """Remove a run and all its records, so that its id is free.

        Args:
            run: the run.
            effects: receives the deletion.
            message: why, for the log.
        """
        run.end()
        self._reviews.disarm(run)
        del self._runs[run.run_id]
        self._restored.discard(run)
        effects.records.append(ForgetRun(run.run_id))
        effects.forgotten.append(run.run_id)
        effects.notices.append(Notice("run.forgotten", run.run_id, message))


def forgotten(run: Run) -> Refusal:
    """Return the refusal for clients of a run that an operator removed."""
    return Refusal(
        Reason.RUN_FORGOTTEN,
        f"{report.forgotten_on_demand(run.run_id)}. Nothing of it is kept, and what waits for it will not be "
        "decided. End this process, and start the job again.",
    )
