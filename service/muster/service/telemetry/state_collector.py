"""Prometheus gauges that are read from the state at each scrape."""

from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from muster.service.clock import Clock
from muster.service.core import views
from muster.service.core.coordinator import Coordinator
from muster.service.core.run import Run
from muster.service.core.vocabulary.model import MemberState, Save, SaveState
from muster.service.telemetry.labels import OVERFLOW
from muster.service.telemetry.local_gauges import add_local, local_families
from muster.service.telemetry.metrics import Metrics


class StateCollector(Collector):
    """Reads gauges from the state at each scrape, so that the hot path does not keep them.

    Args:
        coordinator: the state.
        metrics: gives the label values.
        clock: the clock of the state's times.
    """

    def __init__(self, coordinator: Coordinator, metrics: Metrics, clock: Clock) -> None:
        self._coordinator = coordinator
        self._metrics = metrics
        self._clock = clock

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return the families without samples."""
        return self._families().values()

    @staticmethod
    def _families() -> dict[str, GaugeMetricFamily]:
        group = ["run", "prefix"]
        return {
            "open": GaugeMetricFamily("muster_barriers_open", "Barriers that wait for ranks.", labels=group),
            "missing": GaugeMetricFamily(
                "muster_barrier_missing_ranks",
                "Ranks that the open barrier waits for; 0 when none is open.",
                labels=group,
            ),
            "age": GaugeMetricFamily(
                "muster_barrier_open_seconds",
                "Time since the first arrival at the oldest open barrier; 0 when none is open.",
                labels=group,
            ),
            "timeout": GaugeMetricFamily(
                "muster_barrier_timeout_seconds",
                "Timeout of the oldest open barrier, from its first arrival; 0 when none is open.",
                labels=group,
            ),
            "runs": GaugeMetricFamily(
                "muster_runs",
                "Runs, by whether they are open, stopped to be resumed, or closed.",
                labels=["state"],
            ),
            "limit": GaugeMetricFamily(
                "muster_limit",
                "Bounds that all runs share: beyond them requests are refused.",
                labels=["limit"],
            ),
            "used": GaugeMetricFamily("muster_limit_used", "How much of them is used.", labels=["limit"]),
            "members": GaugeMetricFamily(
                "muster_members", "Ranks, by the state of their newest process.", labels=["run", "state"]
            ),
            "sessions": GaugeMetricFamily(
                "muster_sessions", "Open sessions; a relay's is one.", labels=["run"]
            ),
            "stopped": GaugeMetricFamily(
                "muster_run_stopped",
                "1 if the run was stopped on request, and can be resumed.",
                labels=["run"],
            ),
            "closed": GaugeMetricFamily("muster_run_closed", "1 if the run is closed.", labels=["run"]),
            "step": GaugeMetricFamily(
                "muster_run_step",
                "Highest training step reported by any rank.",
                labels=["run"],
            ),
            "spread": GaugeMetricFamily(
                "muster_run_step_spread", "Steps between the run's first rank and its last.", labels=["run"]
            ),
            "still": GaugeMetricFamily(
                "muster_run_still_seconds", "Time since one of the run's ranks took a step.", labels=["run"]
            ),
            "asked": GaugeMetricFamily(
                "muster_run_save_asked_seconds",
                "Time since the save was asked for that the run's ranks are still to make.",
                labels=["run"],
            ),
            "deadline": GaugeMetricFamily(
                "muster_run_save_left_seconds",
                "Time until the deadline of the save that the run's ranks are still to make; below 0: late.",
                labels=["run"],
            ),
            "saved": GaugeMetricFamily(
                "muster_run_saved_step",
                "The step at which all ranks made the save that was asked for last.",
                labels=["run"],
            ),
            "took": GaugeMetricFamily(
                "muster_run_save_seconds",
                "Time from the request for that save until all ranks had made it.",
                labels=["run"],
            ),
            "committed_step": GaugeMetricFamily(
                "muster_checkpoint_committed_step",
                "Step of the checkpoint that the run committed last.",
                labels=["run"],
            ),
            "commit_age": GaugeMetricFamily(
                "muster_checkpoint_age_seconds",
                "Time since the run committed a checkpoint.",
                labels=["run"],
            ),
            "checkpoint_bytes": GaugeMetricFamily(
                "muster_checkpoint_bytes",
                "Bytes of that checkpoint, over all ranks that report theirs.",
                labels=["run"],
            ),
            "write": GaugeMetricFamily(
                "muster_checkpoint_write_seconds",
                "Time that the slowest rank took to write its part of that checkpoint.",
                labels=["run"],
            ),
            "interval": GaugeMetricFamily(
                "muster_checkpoint_interval_seconds",
                "Usual time between two commits of the run: the median of the last five intervals.",
                labels=["run"],
            ),
            "unsaved": GaugeMetricFamily(
                "muster_checkpoint_unsaved_seconds",
                "Time that ranks of the run have been connected without a commit.",
                labels=["run"],
            ),
            **local_families(),
            "waiting": GaugeMetricFamily(
                "muster_rendezvous_waiting_nodes",
                "Nodes without a round: nodes that are forming a round, and nodes that wait to be let in.",
                labels=["run"],
            ),
        }

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Read the state."""
        families = self._families()
        moment = self._clock.now()
        now = moment.monotonic
        runs = Tally(open=0, stopped=0, closed=0)
        oldest: dict[tuple[str, str], tuple[float, float]] = {}
        opened: Tally[tuple[str, str]] = Tally()
        missing: Tally[tuple[str, str]] = Tally()
        members: Tally[tuple[str, str]] = Tally()
        sessions: Tally[str] = Tally()
        closed: Tally[str] = Tally()
        stopped: Tally[str] = Tally()
        waiting: Tally[str] = Tally()
        known = self._coordinator.runs
        labels = self._metrics.run_labels(
            {run_id: None if run.in_use else run.last_used.monotonic for run_id, run in known.items()}
        )
        for run in known.values():
            runs[_state(run)] += 1
            run_label = labels.get(run.run_id)
            if run_label is None:
                continue
            if run_label != OVERFLOW:
                closed[run_label] = int(run.closed is not None)
                stopped[run_label] = int(run.stopping.stopped is not None)
                if (steps := views.steps(run)) is not None:
                    families["step"].add_metric([run_label], steps.highest)
                    families["spread"].add_metric([run_label], steps.highest - steps.lowest)
                    families["still"].add_metric([run_label], now - steps.moved_at)
                if (save := run.saving.save) is not None:
                    _add_save(families, run_label, save, moment.wall)
                if (view := views.checkpoints(run, moment)) is not None:
                    _add_checkpoint(families, run_label, view)
                add_local(families, run_label, run.local, moment.wall)
            sessions[run_label] += 0
            waiting[run_label] += run.rendezvous.without_round
            newest = {process.rank: process.state for process in run.roster}
            states = Tally(newest.values())
            for state in MemberState:
                members[run_label, state.name.lower()] += states[state]
            for group in run.groups.values():
                key = run_label, self._metrics.prefix_label(run_label, group.prefix)
                barrier = group.open
                opened[key] += barrier is not None
                missing[key] += barrier.shape.size - len(barrier.arrivals) if barrier else 0
                wait = (now - barrier.opened_at, barrier.timeout) if barrier else (0.0, 0.0)
                oldest[key] = max(wait, oldest.get(key, wait))
        sessions.update(
            labels[session.run.run_id]
            for session in self._coordinator.sessions.open.values()
            if session.run.run_id in labels
        )
        for key, value in opened.items():
            families["open"].add_metric(key, value)
        for key, value in missing.items():
            families["missing"].add_metric(key, value)
        for key, (age, timeout) in oldest.items():
            families["age"].add_metric(key, age)
            families["timeout"].add_metric(key, timeout)
        for run_state, value in runs.items():
            families["runs"].add_metric([run_state], value)
        for usage in views.usage(self._coordinator, moment):
            families["limit"].add_metric([usage.limit], usage.most)
            families["used"].add_metric([usage.limit], usage.used)
        for member, value in members.items():
            families["members"].add_metric(member, value)
        by_run = ("sessions", sessions), ("closed", closed), ("stopped", stopped), ("waiting", waiting)
        for name, counts in by_run:
            for run_label, value in counts.items():
                families[name].add_metric([run_label], value)
        yield from families.values()


def _state(run: Run) -> str:
    if run.closed is not None:
        return "closed"
    return "stopped" if run.stopping.stopped is not None else "open"


class Scrape(Collector):
    """All metrics at one time, for any thread to collect.

    Make it on the thread of the state. The counts are read later, at the collection.

    Args:
        state: reads the state.
        registry: has the counts.
    """

    def __init__(self, state: StateCollector, registry: CollectorRegistry) -> None:
        self._state = list(state.collect())
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """Yield the counts, and the state as it was read."""
        yield from self._registry.collect()
        yield from self._state


def _add_save(families: Mapping[str, GaugeMetricFamily], run_label: str, save: Save, now: float) -> None:
    """Add the newest requested save of a run.

    Args:
        families: receive the samples.
        run_label: the run.
        save: the save.
        now: seconds since 1970.
    """
    if save.state.stands:
        families["asked"].add_metric([run_label], max(0.0, now - save.asked_at))
        if save.deadline is not None:
            families["deadline"].add_metric([run_label], save.deadline - now)
    elif save.state is SaveState.DONE and save.step is not None and save.ended_at is not None:
        families["saved"].add_metric([run_label], save.step)
        families["took"].add_metric([run_label], max(0.0, save.ended_at - save.asked_at))


def _add_checkpoint(
    families: Mapping[str, GaugeMetricFamily], run_label: str, view: views.CheckpointsView
) -> None:
    """Add the newest checkpoint of a run, without values that its ranks did not report.

    Args:
        families: receive the samples.
        run_label: the run.
        view: its save history.
    """
    newest = view.history.newest
    if newest is None:
        return
    for name, value in (
        ("committed_step", newest.step),
        ("commit_age", view.age),
        ("checkpoint_bytes", newest.bytes),
        ("write", newest.slowest.seconds if newest.slowest is not None else None),
        ("interval", view.history.interval),
        ("unsaved", view.unsaved),
    ):
        if value is not None:
            families[name].add_metric([run_label], value)
