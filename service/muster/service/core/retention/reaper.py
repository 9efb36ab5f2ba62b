"""How runs go: those that nobody uses in their time, and the one that an operator names at once."""

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
from muster.service.core.vocabulary.effects import Effects, ForgetRun, Notice
from muster.service.core.vocabulary.model import Instant
from muster.service.core.vocabulary.refusal import Reason, Refusal


class RunReaper:
    """Looks at the runs in their time, and removes them.

    Args:
        runs: all of the coordinator's, by id.
        retention: how long runs are kept that nobody uses.
        coming_back: seconds that whoever used a run may take to come back after a start.
    """

    def __init__(self, runs: dict[str, Run], retention: Retention, reconnect_time: float) -> None:
        self._runs = runs
        self._reconnect_time = reconnect_time
        self._retention = retention
        self._reviews: Timers[Run] = Timers()
        """When to see whether a run is to be forgotten."""
        self._next_review_at = -math.inf
        """They pause until then."""
        self._serving_since = -math.inf
        """When the coordinator began to serve."""
        self._restored: set[Run] = set()
        """The runs of that state."""

    def restore(self, now: Instant) -> None:
        """The runs were taken back: look at each in its time."""
        self._restored = set(self._runs.values())
        for run in self._runs.values():
            # What an older version kept is looked at soon, so that its time is written down.
            self._reviews.arm(
                run, self._retention.due(run) if run.recorded_use is not None else now.monotonic
            )

    def serve(self, now: Instant) -> None:
        """Callers can come back from now on."""
        self._serving_since = now.monotonic

    def next_time(self) -> float | None:
        """When there may be a run to look at, on the monotonic clock."""
        review = self._reviews.next_time()
        return None if review is None else max(review, self._next_review_at)

    def mark_used(self, run: Run | None, now: Instant, effects: Effects) -> None:
        """Someone did something with a run, or left it: the time begins anew until it is forgotten."""
        if run is None or self._runs.get(run.run_id) is not run:
            return
        run.last_used = now
        if run.recorded_use is None or now.monotonic - run.recorded_use.monotonic >= USE_RECORD_INTERVAL:
            run.write_record(now, effects)
        self.review_in_time(run)

    def review_in_time(self, run: Run | None) -> None:
        """See to it that a run is looked at when its time may be over."""
        if run is not None:
            self._reviews.arm(run, self._retention.due(run))

    def review(self, now: Instant, effects: Effects) -> None:
        """Forget the runs whose time is over, so many at once."""
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
            # Whoever uses the run has it looked at again at the end of that.

    def find_reclaimable(self, now: Instant) -> Run | None:
        """The closed run that has been out of use for longest; a new one may take its place."""
        finished = (run for run in self._runs.values() if self.is_reclaimable(run, now))
        return min(finished, key=lambda run: run.last_used.monotonic, default=None)

    def is_reclaimable(self, run: Run, now: Instant) -> bool:
        """Whether a run is closed, not kept for ever, and whoever may come back to it had the time.

        Who calls now and then uses the run all the same, and after a start of the coordinator nobody is
        connected yet.
        """
        unused = now.monotonic - max(run.last_used.monotonic, self._serving_since)
        spare = run.closed is not None and self._retention.closed > 0 and unused >= USE_RECORD_INTERVAL
        return spare and not run.in_use

    def check_unused(self, run: Run, now: Instant) -> None:
        """Refuse to remove a run that someone uses, or may use: after a start nobody is connected yet.

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
        """Remove a run with all that is kept of it, so that its id is free.

        Args:
            run: the run.
            effects: is added to.
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
    """What those hear who are connected to a run that an operator has forgotten."""
    return Refusal(
        Reason.RUN_FORGOTTEN,
        f"{report.forgotten_on_demand(run.run_id)}. Nothing of it is kept, and what waits for it will not be "
        "decided. End this process, and start the job anew.",
    )
