"""Prometheus metrics: counters fed by events, and gauges read off the state when it is scraped."""

from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from muster.service.clock import Clock
from muster.service.core import views
from muster.service.core.coordinator import Coordinator
from muster.service.core.vocabulary.effects import Notice, RoundRecord
from muster.service.core.vocabulary.model import Decision, MemberState, Outcome, Save, SaveState
from muster.service.formatting.save_groups import SAVE_GROUPS
from muster.service.telemetry.labels import OVERFLOW, PrefixLabels, RunLabels
from muster.service.version import VERSION

WAIT_BUCKETS = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
COMMIT_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
CALL_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300, 1800)
MAX_RUNS = 200
MAX_PREFIXES = 16
"""Of each run, beside those of its saves: some 50 series are shown for each."""


class Certificate(Protocol):
    """What a server shows in the TLS handshake."""

    @property
    def expires_at(self) -> float:
        """When it ends, in seconds since 1970."""
        ...


class Metrics:
    """All metrics of one coordinator, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
            self.registry.register(collector)
        self._runs = RunLabels(MAX_RUNS, self._end)
        self._prefixes: dict[str, PrefixLabels] = {}
        """By the label of their run."""
        self._groups: dict[str, set[str]] = {}
        """The labels of prefixes whose counts are shown, by the label of their run."""
        group = ["run", "prefix"]
        registry = self.registry
        Info("muster_build", "The coordinator's version.", registry=registry).info({"version": VERSION})
        self._epoch = Gauge(
            "muster_coordinator_epoch",
            "How often the coordinator was started on its state.",
            registry=registry,
        )
        self._start_time = Gauge(
            "muster_start_time_seconds",
            "When the coordinator took hold of its state, in seconds since 1970.",
            registry=registry,
        )
        self._decisions = Counter(
            "muster_barrier_decisions",
            "Barriers decided, by outcome.",
            [*group, "outcome"],
            registry=registry,
        )
        self._wait = Histogram(
            "muster_barrier_wait_seconds",
            "Time from the first arrival at a barrier to its decision.",
            group,
            buckets=WAIT_BUCKETS,
            registry=registry,
        )
        self._skew = Histogram(
            "muster_barrier_skew_seconds",
            "Time from the first to the last arrival at a barrier.",
            group,
            buckets=WAIT_BUCKETS,
            registry=registry,
        )
        self._last_rank = Gauge(
            "muster_barrier_last_arrival_rank",
            "The rank that arrived last at the newest barrier: the straggler.",
            group,
            registry=registry,
        )
        self._rounds = Counter(
            "muster_rendezvous_rounds", "Rendezvous rounds completed.", ["run"], registry=registry
        )
        self._join = Histogram(
            "muster_rendezvous_join_seconds",
            "Time from the first join of a rendezvous round to its completion.",
            ["run"],
            buckets=WAIT_BUCKETS,
            registry=registry,
        )
        self._commit = Histogram(
            "muster_storage_commit_seconds",
            "Time to make a batch of records durable.",
            buckets=COMMIT_BUCKETS,
            registry=registry,
        )
        self.commit_open = Gauge(
            "muster_storage_commit_open_seconds",
            "How long the commit that is under way has taken; 0 if there is none.",
            registry=registry,
        )
        self.storage_errors = Counter(
            "muster_storage_errors",
            "Commits that failed; the coordinator stops at the first one.",
            registry=registry,
        )
        rpc = ["grpc_type", "grpc_service", "grpc_method"]
        self._rpc_started = Counter(
            "grpc_server_started", "Calls begun on the server.", rpc, registry=registry
        )
        self._rpc_handled = Counter(
            "grpc_server_handled",
            "Calls ended on the server, whatever their status.",
            [*rpc, "grpc_code"],
            registry=registry,
        )
        self._rpc_seconds = Histogram(
            "grpc_server_handling_seconds",
            "Time that the server spent on a call.",
            rpc,
            buckets=CALL_BUCKETS,
            registry=registry,
        )

    def began(self, epoch: int, at: float) -> None:
        """The coordinator has its state.

        Args:
            epoch: how often that state was opened.
            at: seconds since 1970.
        """
        self._epoch.set(epoch)
        self._start_time.set(at)

    def run_labels(self, runs: Mapping[str, float | None]) -> dict[str, str]:
        """The label values of all runs that there are, as :meth:`RunLabels.of_all` gives them."""
        labels = self._runs.of_all(runs)
        for label in labels.values():
            self._expect_run(label)
        return labels

    def prefix_label(self, run: str, prefix: str) -> str:
        """The label value for a group of the run with this label value."""
        label = self._prefixes[run](prefix)
        groups = self._groups[run]
        if label not in groups:
            groups.add(label)
            # A rate does not see a series begin at 1.
            for outcome in Outcome:
                self._decisions.labels(run, label, outcome.name)
            self._wait.labels(run, label)
            self._skew.labels(run, label)
        return label

    def _run_label(self, run_id: str) -> str:
        """The label value of a run that is in use."""
        label = self._runs.used(run_id)
        self._expect_run(label)
        return label

    def _expect_run(self, label: str) -> None:
        """Show the counts of a run at zero."""
        if label not in self._prefixes:
            self._prefixes[label] = PrefixLabels(MAX_PREFIXES, SAVE_GROUPS)
            self._groups[label] = set()
            self._rounds.labels(label)
            self._join.labels(label)

    def _end(self, label: str) -> None:
        """The series of a run end."""
        del self._prefixes[label]
        for prefix in self._groups.pop(label):
            for outcome in Outcome:
                self._decisions.remove(label, prefix, outcome.name)
            for metric in (self._wait, self._skew, self._last_rank):
                metric.remove(label, prefix)
        self._rounds.remove(label)
        self._join.remove(label)

    # ------------------------------------------------------------------ the driver's observer

    def decided(self, decision: Decision) -> None:
        """A barrier was decided."""
        run = self._run_label(decision.run_id)
        labels = run, self.prefix_label(run, decision.prefix)
        self._decisions.labels(*labels, decision.outcome.name).inc()
        self._wait.labels(*labels).observe(decision.wait)
        self._skew.labels(*labels).observe(decision.skew)
        if decision.last_arrival_rank is not None:
            self._last_rank.labels(*labels).set(decision.last_arrival_rank)

    def round_completed(self, record: RoundRecord) -> None:
        """A rendezvous has brought its nodes together."""
        label = self._run_label(record.run_id)
        self._rounds.labels(label).inc()
        self._join.labels(label).observe(record.join_seconds)

    def noticed(self, notice: Notice) -> None:
        """Notices are logged, not counted."""

    def forgotten(self, run_id: str) -> None:
        """Nothing is left of a run: its series end, but for what was added up with others."""
        self._runs.forget(run_id)

    def committed(self, seconds: float) -> None:
        """A batch of records is durable."""
        self._commit.observe(seconds)

    # ------------------------------------------------------------------ the certificate

    def show_certificate_expiry(self, certificate: Certificate) -> None:
        """Show, from now on, when the certificate in force ends."""
        Gauge(
            "muster_tls_certificate_expiry_timestamp_seconds",
            "When the server's certificate ends, in seconds since 1970.",
            registry=self.registry,
        ).set_function(lambda: certificate.expires_at)

    # ------------------------------------------------------------------ the server's observer

    def expect(self, kind: str, method: str) -> None:
        """Show a method from the start, at zero."""
        service, name = _split(method)
        self._rpc_started.labels(kind, service, name)
        self._rpc_handled.labels(kind, service, name, "OK")
        self._rpc_seconds.labels(kind, service, name)

    def started(self, kind: str, method: str) -> None:
        """A call has begun."""
        self._rpc_started.labels(kind, *_split(method)).inc()

    def handled(self, kind: str, method: str, code: str, seconds: float) -> None:
        """A call has ended."""
        service, name = _split(method)
        self._rpc_handled.labels(kind, service, name, code).inc()
        self._rpc_seconds.labels(kind, service, name).observe(seconds)


def _split(method: str) -> tuple[str, str]:
    service, _, name = method.strip("/").partition("/")
    return service, name


class StateCollector(Collector):
    """Gauges that are read off the state at each scrape, so that the hot path does not keep them.

    Args:
        coordinator: the state.
        metrics: whose label values are used.
        clock: the one that the state's times are on.
    """

    def __init__(self, coordinator: Coordinator, metrics: Metrics, clock: Clock) -> None:
        self._coordinator = coordinator
        self._metrics = metrics
        self._clock = clock

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """The families without samples."""
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
            "runs": GaugeMetricFamily("muster_runs", "Runs, by whether they are closed.", labels=["state"]),
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
            "closed": GaugeMetricFamily("muster_run_closed", "1 if the run is closed.", labels=["run"]),
            "step": GaugeMetricFamily(
                "muster_run_step",
                "The training step of the run's first rank, of those that tell theirs.",
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
            "waiting": GaugeMetricFamily(
                "muster_rendezvous_waiting_nodes",
                "Nodes without a round: those that come together, and those that wait to be let in.",
                labels=["run"],
            ),
        }

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Count what there is now."""
        families = self._families()
        moment = self._clock.now()
        now = moment.monotonic
        runs = Tally(open=0, closed=0)
        oldest: dict[tuple[str, str], tuple[float, float]] = {}
        opened: Tally[tuple[str, str]] = Tally()
        missing: Tally[tuple[str, str]] = Tally()
        members: Tally[tuple[str, str]] = Tally()
        sessions: Tally[str] = Tally()
        closed: Tally[str] = Tally()
        waiting: Tally[str] = Tally()
        known = self._coordinator.runs
        labels = self._metrics.run_labels(
            {run_id: None if run.in_use else run.last_used.monotonic for run_id, run in known.items()}
        )
        for run in known.values():
            runs["open" if run.closed is None else "closed"] += 1
            run_label = labels.get(run.run_id)
            if run_label is None:
                continue
            if run_label != OVERFLOW:
                closed[run_label] = int(run.closed is not None)
                if (steps := views.steps(run)) is not None:
                    families["step"].add_metric([run_label], steps.highest)
                    families["spread"].add_metric([run_label], steps.highest - steps.lowest)
                    families["still"].add_metric([run_label], now - steps.moved_at)
                if (save := run.saving.save) is not None:
                    _add_save(families, run_label, save, moment.wall)
                if (view := views.checkpoints(run, moment)) is not None:
                    _add_checkpoint(families, run_label, view)
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
        for name, counts in (("sessions", sessions), ("closed", closed), ("waiting", waiting)):
            for run_label, value in counts.items():
                families[name].add_metric([run_label], value)
        yield from families.values()


class Scrape(Collector):
    """One look at everything, which any thread may collect.

    It is made where the state lives. The counts are read when it is collected: they may change meanwhile.

    Args:
        state: what is read off the state.
        registry: the counts.
    """

    def __init__(self, state: StateCollector, registry: CollectorRegistry) -> None:
        self._state = list(state.collect())
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """The counts, and the state as it was."""
        yield from self._registry.collect()
        yield from self._state


def _add_save(families: Mapping[str, GaugeMetricFamily], run_label: str, save: Save, now: float) -> None:
    """Show the save that a run's ranks were asked for.

    Args:
        families: where it is added.
        run_label: the run.
        save: the newest.
        now: seconds since 1970.
    """
    if save.state.stands:
        families["asked"].add_metric([run_label], max(0.0, now - save.asked_at))
    elif save.state is SaveState.DONE and save.step is not None and save.ended_at is not None:
        families["saved"].add_metric([run_label], save.step)
        families["took"].add_metric([run_label], max(0.0, save.ended_at - save.asked_at))


def _add_checkpoint(
    families: Mapping[str, GaugeMetricFamily], run_label: str, view: views.CheckpointsView
) -> None:
    """Show the newest checkpoint of a run. A value that its ranks did not report is absent.

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
