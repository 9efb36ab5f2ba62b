"""Prometheus metrics that events of the driver and the server update."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

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

from muster.client.trace_ids import barrier_trace, round_trace, trace_text
from muster.service.core.vocabulary.effects import Notice
from muster.service.core.vocabulary.model import Decision, Outcome
from muster.service.core.vocabulary.records import RoundRecord
from muster.service.formatting.save_groups import SAVE_GROUPS
from muster.service.telemetry.labels import PrefixLabels, RunLabels
from muster.service.telemetry.trace_budget import TraceBudget
from muster.service.version import VERSION

WAIT_BUCKETS = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
COMMIT_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
CALL_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300, 1800)
MAX_RUNS = 200
MAX_PREFIXES = 16
"""Prefixes of each run, besides those of its saves. Each has about 50 series."""


class Reloadable(Protocol):
    """A value of files that is loaded again when they change."""

    @property
    def what(self) -> str:
        """Its name."""
        ...

    @property
    def failed(self) -> bool:
        """Whether the newest files could not be loaded."""
        ...


class Certificate(Protocol):
    """The certificate of a server."""

    @property
    def expires_at(self) -> float:
        """When it expires, in seconds since 1970."""
        ...


class _GroupMetric(NamedTuple):
    """A metric with a series for each group."""

    metric: Counter | Gauge | Histogram
    """Its labels are ``run``, ``prefix`` and perhaps others."""
    others: tuple[tuple[str, ...], ...] = ((),)
    """The values that its other labels may have."""
    is_shown_at_zero: bool = True
    """Whether its series are shown before anything is counted: a rate does not see one that begins at 1."""


class Metrics:
    """All metrics of one coordinator, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
            self.registry.register(collector)
        self._runs = RunLabels(MAX_RUNS, self._end)
        self._prefixes: dict[str, PrefixLabels] = {}
        """By the label of the run."""
        self._budget: TraceBudget | None = None
        self._groups: dict[str, set[str]] = {}
        """The labels of prefixes that have series, by the label of the run."""
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
        self._group_metrics = (
            _GroupMetric(self._decisions, tuple((outcome.name,) for outcome in Outcome)),
            _GroupMetric(self._wait),
            _GroupMetric(self._skew),
            _GroupMetric(self._last_rank, is_shown_at_zero=False),
        )
        """All metrics of groups. Their series end with the run."""
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
        self._run_metrics = self._rounds, self._join
        """All metrics of runs."""
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
        """Record that the coordinator has opened its state.

        Args:
            epoch: how often the state was opened.
            at: seconds since 1970.
        """
        self._epoch.set(epoch)
        self._start_time.set(at)

    def link_traces(self) -> None:
        """Name the trace of each traced barrier and round as the exemplar of its bucket, from now on."""
        self._budget = TraceBudget()

    def _exemplar_of(self, decision: Decision) -> dict[str, str] | None:
        if self._budget is None or not self._budget.admits(decision):
            return None
        trace = barrier_trace(decision.run_id, decision.prefix, decision.sequence)
        return {"trace_id": trace_text(trace)}

    def run_labels(self, runs: Mapping[str, float | None]) -> dict[str, str]:
        """Return the label values of all runs. See :meth:`RunLabels.of_all`."""
        labels = self._runs.of_all(runs)
        for label in labels.values():
            self._expect_run(label)
        return labels

    def prefix_label(self, run: str, prefix: str) -> str:
        """Return the label value for a group of the run with this label value."""
        label = self._prefixes[run](prefix)
        groups = self._groups[run]
        if label not in groups:
            groups.add(label)
            for one in self._group_metrics:
                for others in one.others if one.is_shown_at_zero else ():
                    one.metric.labels(run, label, *others)
        return label

    def _run_label(self, run_id: str) -> str:
        """Return the label value of a run in use."""
        label = self._runs.used(run_id)
        self._expect_run(label)
        return label

    def _expect_run(self, label: str) -> None:
        """Show the counts of a run at 0."""
        if label not in self._prefixes:
            self._prefixes[label] = PrefixLabels(MAX_PREFIXES, SAVE_GROUPS)
            self._groups[label] = set()
            for metric in self._run_metrics:
                metric.labels(label)

    def _end(self, label: str) -> None:
        """Remove the series of a run."""
        del self._prefixes[label]
        for prefix in self._groups.pop(label):
            for one in self._group_metrics:
                for others in one.others:
                    one.metric.remove(label, prefix, *others)
        for metric in self._run_metrics:
            metric.remove(label)

    # ------------------------------------------------------------------ the driver's observer

    def decided(self, decision: Decision) -> None:
        """Count a decision."""
        run = self._run_label(decision.run_id)
        labels = run, self.prefix_label(run, decision.prefix)
        self._decisions.labels(*labels, decision.outcome.name).inc()
        exemplar = self._exemplar_of(decision)
        self._wait.labels(*labels).observe(decision.wait, exemplar)
        self._skew.labels(*labels).observe(decision.skew, exemplar)
        if decision.last_arrival_rank is not None:
            self._last_rank.labels(*labels).set(decision.last_arrival_rank)

    def round_completed(self, record: RoundRecord) -> None:
        """Count a complete round."""
        label = self._run_label(record.run_id)
        self._rounds.labels(label).inc()
        trace = round_trace(record.run_id, record.round)
        exemplar = {"trace_id": trace_text(trace)} if self._budget is not None else None
        self._join.labels(label).observe(record.join_seconds, exemplar)

    def noticed(self, notice: Notice) -> None:
        """Count nothing: notices are logged."""

    def forgotten(self, run_id: str) -> None:
        """Remove the series of a run, except those that it shares with others."""
        self._runs.forget(run_id)

    def committed(self, seconds: float) -> None:
        """Record the duration of a commit."""
        self._commit.observe(seconds)

    # ------------------------------------------------------------------ the certificate

    def show_certificate_expiry(self, certificate: Certificate) -> None:
        """Show from now on when the certificate in force expires."""
        Gauge(
            "muster_tls_certificate_expiry_timestamp_seconds",
            "When the server's certificate ends, in seconds since 1970.",
            registry=self.registry,
        ).set_function(lambda: certificate.expires_at)

    # ------------------------------------------------------------------ files that are loaded again

    def show_reloads(self, files: Sequence[Reloadable]) -> None:
        """Show from now on for which files the newest version could not be loaded."""
        gauge = Gauge(
            "muster_reload_failed",
            "1 while the newest files cannot be loaded, so that what was loaded before is in force, else 0.",
            ["what"],
            registry=self.registry,
        )
        for one in files:
            gauge.labels(one.what).set_function(partial(_failed, one))

    # ------------------------------------------------------------------ the server's observer

    def expect(self, kind: str, method: str) -> None:
        """Show a method at 0 before its first call."""
        service, name = _split(method)
        self._rpc_started.labels(kind, service, name)
        self._rpc_handled.labels(kind, service, name, "OK")
        self._rpc_seconds.labels(kind, service, name)

    def started(self, kind: str, method: str) -> None:
        """Count a call that has begun."""
        self._rpc_started.labels(kind, *_split(method)).inc()

    def handled(self, kind: str, method: str, code: str, seconds: float) -> None:
        """Count a call that has ended."""
        service, name = _split(method)
        self._rpc_handled.labels(kind, service, name, code).inc()
        self._rpc_seconds.labels(kind, service, name).observe(seconds)


def _failed(one: Reloadable) -> float:
    return float(one.failed)


def _split(method: str) -> tuple[str, str]:
    service, _, name = method.strip("/").partition("/")
    return service, name
