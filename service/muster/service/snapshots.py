"""Views of runs, made once and shared by all watches and pages of the same moment."""

import dataclasses
from dataclasses import dataclass

from muster.service.core import views
from muster.service.core.coordinator import Coordinator
from muster.service.core.run import Run
from muster.service.core.vocabulary.model import Instant
from muster.service.security.patterns import matches

INTERVAL = 0.2
"""Seconds for which a view is reused: making one of 16,384 ranks takes milliseconds of the event loop."""
ALL = ("*",)
"""Patterns that match all runs."""


@dataclass(frozen=True, slots=True, eq=False)
class RunSnapshot:
    """One run at the time of a snapshot."""

    view: views.RunView
    counts: views.RunView
    """The view without fields that change all the time. The object stays the same while its value does."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The runs that match some patterns, by id."""

    taken_at: float
    """Seconds on the monotonic clock."""
    runs: tuple[RunSnapshot, ...]


class Snapshots:
    """Makes views of runs on demand, at most one of each run in an :data:`INTERVAL`."""

    def __init__(self) -> None:
        self._taken_at = float("-inf")
        self._made: dict[str, tuple[Run, RunSnapshot]] = {}
        self._before: dict[str, tuple[Run, RunSnapshot]] = {}
        """The views of the last interval, for their counts."""
        self._matching: dict[tuple[str, ...], Snapshot] = {}

    def take(self, coordinator: Coordinator, now: Instant, patterns: tuple[str, ...] = ALL) -> Snapshot:
        """Return the runs whose ids match one of the patterns, as they were at most an interval ago."""
        self._begin(now)
        found = self._matching.get(patterns)
        if found is None:
            runs = coordinator.runs
            wanted = sorted(runs if "*" in patterns else (one for one in runs if matches(one, patterns)))
            made = tuple(self._made_of(runs[run_id], now) for run_id in wanted)
            found = self._matching[patterns] = Snapshot(self._taken_at, made)
        return found

    def take_one(self, coordinator: Coordinator, now: Instant, run_id: str) -> Snapshot:
        """Return a run, as it was at most an interval ago; an empty snapshot if it is unknown."""
        self._begin(now)
        run = coordinator.runs.get(run_id)
        return Snapshot(self._taken_at, () if run is None else (self._made_of(run, now),))

    def _begin(self, now: Instant) -> None:
        """Start a new interval if the last one is over."""
        if now.monotonic - self._taken_at >= INTERVAL:
            self._taken_at = now.monotonic
            self._before, self._made = self._made, {}
            self._matching.clear()

    def _made_of(self, run: Run, now: Instant) -> RunSnapshot:
        made = self._made.get(run.run_id)
        if made is None or made[0] is not run:
            view = views.run(run, now)
            counts = _counts(view)
            last = self._before.get(run.run_id)
            if last is not None and last[1].counts == counts:
                counts = last[1].counts
            made = self._made[run.run_id] = (run, RunSnapshot(view, counts))
        return made[1]


def _counts(view: views.RunView) -> views.RunView:
    """Return a view without the store's use, training steps and a checkpoint's age."""
    checkpoints = view.checkpoints
    if checkpoints is not None:
        checkpoints = dataclasses.replace(checkpoints, age=0.0, unsaved=None)
    return dataclasses.replace(view, store_keys=0, store_bytes=0, steps=None, checkpoints=checkpoints)
