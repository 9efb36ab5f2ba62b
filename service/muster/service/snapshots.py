"""Views of runs, made once for everyone who looks at about the same time."""

import dataclasses
from dataclasses import dataclass

from muster.service.core import views
from muster.service.core.coordinator import Coordinator
from muster.service.core.run import Run
from muster.service.core.vocabulary.model import Instant
from muster.service.security.patterns import matches

INTERVAL = 0.2
"""Seconds for which a view is shown again: one of 16,384 ranks takes milliseconds of the loop."""
ALL = ("*",)
"""The patterns that all runs match."""


@dataclass(frozen=True, slots=True, eq=False)
class RunSnapshot:
    """One run at the moment of a snapshot."""

    view: views.RunView
    counts: views.RunView
    """The view without what changes all the time. It is the same object for as long as it is the same."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The runs that match some patterns, by id."""

    taken_at: float
    """On the monotonic clock; the state may have changed since."""
    runs: tuple[RunSnapshot, ...]


class Snapshots:
    """Makes the views of runs: of each run one in an :data:`INTERVAL`, and none that nobody asks for."""

    def __init__(self) -> None:
        self._taken_at = float("-inf")
        self._made: dict[str, tuple[Run, RunSnapshot]] = {}
        self._before: dict[str, tuple[Run, RunSnapshot]] = {}
        """Of the last interval, for their counts."""
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
        """Return the run of an id, as it was at most an interval ago; nothing if it is not known."""
        self._begin(now)
        run = coordinator.runs.get(run_id)
        return Snapshot(self._taken_at, () if run is None else (self._made_of(run, now),))

    def _begin(self, now: Instant) -> None:
        """Begin a new interval, if the last one is over."""
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
    """Return a view without what changes all the time: a store's use, training steps, a checkpoint's age."""
    checkpoints = view.checkpoints
    if checkpoints is not None:
        checkpoints = dataclasses.replace(checkpoints, age=0.0, unsaved=None)
    return dataclasses.replace(view, store_keys=0, store_bytes=0, steps=None, checkpoints=checkpoints)
