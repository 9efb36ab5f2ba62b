"""Counters that events update, and their series."""

import pytest
from prometheus_client.metrics import MetricWrapperBase

from lab import records
from muster.service.core.vocabulary.effects import Notice
from muster.service.core.vocabulary.model import Outcome
from muster.service.core.vocabulary.records import RoundRecord
from muster.service.rpc.server import METHODS
from muster.service.telemetry.labels import OVERFLOW
from muster.service.telemetry.metrics import MAX_PREFIXES, MAX_RUNS, Metrics
from muster.service.telemetry.observers import Observers
from muster.service.version import VERSION
from tests.support.world.core_client import CKPT
from tests.support.world.core_world import RUN, World
from tests.unit.service.telemetry.scraping import (
    JOB,
    counts_of,
    exposed,
    letters,
    series,
    value,
    watch,
)

FAMILIES = {
    "muster_barriers_open": "gauge",
    "muster_barrier_decisions_total": "counter",
    "muster_barrier_wait_seconds": "histogram",
    "muster_barrier_skew_seconds": "histogram",
    "muster_barrier_last_arrival_rank": "gauge",
    "muster_barrier_missing_ranks": "gauge",
    "muster_barrier_open_seconds": "gauge",
    "muster_barrier_timeout_seconds": "gauge",
    "muster_runs": "gauge",
    "muster_limit": "gauge",
    "muster_limit_used": "gauge",
    "muster_coordinator_epoch": "gauge",
    "muster_start_time_seconds": "gauge",
    "muster_members": "gauge",
    "muster_sessions": "gauge",
    "muster_run_closed": "gauge",
    "muster_run_stopped": "gauge",
    "muster_run_step": "gauge",
    "muster_run_step_spread": "gauge",
    "muster_run_still_seconds": "gauge",
    "muster_run_save_asked_seconds": "gauge",
    "muster_run_save_left_seconds": "gauge",
    "muster_run_saved_step": "gauge",
    "muster_run_save_seconds": "gauge",
    "muster_checkpoint_committed_step": "gauge",
    "muster_checkpoint_age_seconds": "gauge",
    "muster_checkpoint_bytes": "gauge",
    "muster_checkpoint_write_seconds": "gauge",
    "muster_checkpoint_interval_seconds": "gauge",
    "muster_checkpoint_unsaved_seconds": "gauge",
    "muster_local_checkpoint_step": "gauge",
    "muster_local_checkpoint_age_seconds": "gauge",
    "muster_local_checkpoint_behind_seconds": "gauge",
    "muster_local_checkpoint_single_copies": "gauge",
    "muster_local_checkpoint_domains": "gauge",
    "muster_keepers": "gauge",
    "muster_keeper_disk_used_bytes": "gauge",
    "muster_keeper_disk_quota_bytes": "gauge",
    "muster_keeper_disk_used_ratio": "gauge",
    "muster_rendezvous_waiting_nodes": "gauge",
    "muster_rendezvous_rounds_total": "counter",
    "muster_rendezvous_join_seconds": "histogram",
    "muster_storage_commit_seconds": "histogram",
    "muster_storage_commit_open_seconds": "gauge",
    "muster_storage_errors_total": "counter",
    "grpc_server_started_total": "counter",
    "grpc_server_handled_total": "counter",
    "grpc_server_handling_seconds": "histogram",
    "muster_build_info": "gauge",
    "process_resident_memory_bytes": "gauge",
    "python_gc_collections_total": "counter",
}
"""The metrics of barriers, members, sessions, storage, RPCs and the process."""


# ---------------------------------------------------------------------- before anything happens


def test_every_family_has_its_help_and_type_from_the_start(metrics: Metrics, world: World):
    watch(metrics, world)
    lines = exposed(metrics)
    for name, kind in FAMILIES.items():
        assert f"# TYPE {name} {kind}" in lines
        (text,) = (line for line in lines if line.startswith(f"# HELP {name} "))
        assert len(text.removeprefix(f"# HELP {name} ")) > 5


def test_every_family_of_ours_is_known_to_this_test(metrics: Metrics, world: World):
    watch(metrics, world)
    shown = {line.split()[2] for line in exposed(metrics) if line.startswith("# TYPE")}
    ours = {name for name in shown if name.startswith(("muster_", "grpc_")) and not name.endswith("_created")}
    assert ours <= set(FAMILIES)


def test_every_method_is_shown_at_zero_before_any_call(metrics: Metrics):
    for method in METHODS:
        metrics.expect("unary", method)
    assert METHODS
    for method in METHODS:
        _, service, name = method.split("/")
        labels = {"grpc_type": "unary", "grpc_service": service, "grpc_method": name}
        assert value(metrics, "grpc_server_started_total", **labels) == 0
        assert value(metrics, "grpc_server_handled_total", **labels, grpc_code="OK") == 0
        assert value(metrics, "grpc_server_handling_seconds_count", **labels) == 0


def test_metrics_without_labels_start_at_zero(metrics: Metrics):
    assert value(metrics, "muster_storage_errors_total") == 0
    assert value(metrics, "muster_storage_commit_seconds_count") == 0
    assert value(metrics, "muster_build_info", version=VERSION) == 1


def test_two_coordinators_in_one_process_do_not_share_their_metrics(metrics: Metrics):
    metrics.storage_errors.inc()
    assert value(Metrics(), "muster_storage_errors_total") == 0


# ---------------------------------------------------------------------- events


def test_a_decision_is_counted_by_outcome_and_timed(metrics: Metrics):
    metrics.decided(records.decision(run_id=RUN, wait=12.5, skew=0.25, last_arrival_rank=5))
    metrics.decided(records.decision(run_id=RUN, outcome=Outcome.RELEASED, wait=0.5, last_arrival_rank=2))
    for outcome, count in (("TIMED_OUT", 1), ("RELEASED", 1), ("ABORTED", 0)):
        assert value(metrics, "muster_barrier_decisions_total", **JOB, outcome=outcome) == count
    assert value(metrics, "muster_barrier_wait_seconds_sum", **JOB) == 13
    assert value(metrics, "muster_barrier_wait_seconds_bucket", **JOB, le="0.5") == 1
    assert value(metrics, "muster_barrier_skew_seconds_count", **JOB) == 2
    assert value(metrics, "muster_barrier_last_arrival_rank", **JOB) == 2


def test_barrier_without_arrivals_keeps_the_last_straggler(metrics: Metrics):
    metrics.decided(records.decision(run_id=RUN, last_arrival_rank=5))
    metrics.decided(records.decision(run_id=RUN, last_arrival_rank=None))
    assert value(metrics, "muster_barrier_last_arrival_rank", **JOB) == 5


def test_a_prefix_with_the_step_in_it_makes_no_new_series_every_step(metrics: Metrics):
    metrics.decided(records.decision(prefix="step-12000"))
    before = len(exposed(metrics))
    for step in range(12_001, 12_100):
        metrics.decided(records.decision(prefix=f"step-{step}"))
    assert len(exposed(metrics)) == before
    count = value(metrics, "muster_barrier_decisions_total", run="job1", prefix="step-N", outcome="TIMED_OUT")
    assert count == 100


def test_runs_and_prefixes_beyond_the_bound_are_counted_as_others(metrics: Metrics):
    names = letters(MAX_RUNS + 7)
    for name in names:
        metrics.decided(records.decision(run_id=name))
    for name in names[: MAX_PREFIXES + 3]:
        metrics.decided(records.decision(run_id=names[0], prefix=name))
    # One prefix, checkpoint, was there already.
    assert len(counts_of(metrics)) == MAX_RUNS + 1 + MAX_PREFIXES - 1 + 1
    labels = {"prefix": CKPT, "outcome": "TIMED_OUT"}
    assert value(metrics, "muster_barrier_decisions_total", run=OVERFLOW, **labels) == 7
    labels = {"run": names[0], "outcome": "TIMED_OUT"}
    assert value(metrics, "muster_barrier_decisions_total", prefix=OVERFLOW, **labels) == 4


def test_prefixes_are_bounded_per_run(metrics: Metrics):
    for prefix in letters(100):
        metrics.decided(records.decision(run_id="odd", prefix=prefix))
    metrics.decided(records.decision(run_id=RUN, prefix="checkpoint"))
    assert value(metrics, "muster_barrier_wait_seconds_count", run=RUN, prefix="checkpoint") == 1


@pytest.mark.parametrize("prefix", ["save", "save/plan", "save/commit", "save/agreement", "save/sync"])
def test_save_groups_have_series_beyond_the_bound_of_prefixes(metrics: Metrics, prefix: str):
    for name in letters(100):
        metrics.decided(records.decision(run_id=RUN, prefix=name))
    metrics.decided(records.decision(run_id=RUN, prefix=prefix))
    assert value(metrics, "muster_barrier_wait_seconds_count", run=RUN, prefix=prefix) == 1


def test_epoch_and_start_time_are_shown(metrics: Metrics):
    metrics.began(epoch=7, at=1_700_000_000.5)
    assert value(metrics, "muster_coordinator_epoch") == 7
    assert value(metrics, "muster_start_time_seconds") == 1_700_000_000.5


def test_a_commit_is_timed(metrics: Metrics):
    metrics.committed(0.002)
    metrics.noticed(Notice("event", RUN, "is logged, not counted"))
    assert value(metrics, "muster_storage_commit_seconds_sum") == 0.002
    assert value(metrics, "muster_storage_commit_seconds_bucket", le="0.0025") == 1


def test_a_round_is_counted_and_timed(metrics: Metrics):
    metrics.round_completed(RoundRecord(RUN, 0, 4, 1_700_000_000.0, 31.25))
    metrics.round_completed(RoundRecord(RUN, 1, 4, 1_700_000_000.0, 0.5))
    assert value(metrics, "muster_rendezvous_rounds_total", run=RUN) == 2
    assert value(metrics, "muster_rendezvous_join_seconds_sum", run=RUN) == 31.75
    assert value(metrics, "muster_rendezvous_join_seconds_bucket", run=RUN, le="0.5") == 1


def test_the_rounds_of_runs_beyond_the_bound_are_counted_as_others(metrics: Metrics):
    for number in range(MAX_RUNS + 3):
        metrics.round_completed(RoundRecord(f"job{number}", 0, 1, 0.0, 0.0))
    assert value(metrics, "muster_rendezvous_rounds_total", run=OVERFLOW) == 3
    assert len(series(metrics, "muster_rendezvous_rounds_total")) == MAX_RUNS + 1


def test_forgotten_run_loses_its_series_and_frees_its_place(metrics: Metrics):
    names = letters(MAX_RUNS + 2)
    for name in names:
        metrics.decided(records.decision(run_id=name, prefix="shared"))
        metrics.decided(records.decision(run_id=name, prefix="save"))
        metrics.round_completed(RoundRecord(name, 0, 1, 0.0, 0.5))
    metrics.decided(records.decision(run_id=names[0], prefix="own"))
    known = counts_of(metrics)
    metrics.forgotten(names[0])
    assert not [line for line in exposed(metrics) if f'run="{names[0]}"' in line]
    assert len(counts_of(metrics)) == len(known) - 3
    metrics.decided(records.decision(run_id="next", prefix="shared"))
    assert value(metrics, "muster_barrier_decisions_total", run="next", prefix="shared", outcome="TIMED_OUT")


def test_forgotten_run_leaves_no_series_of_any_metric(metrics: Metrics):
    """Each metric with a label for runs gets a series here, also one that is not shown at 0."""
    metrics.decided(records.decision(run_id=RUN, prefix=CKPT))
    labels = {**JOB, "outcome": Outcome.TIMED_OUT.name}
    touched = 0
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase) and "run" in metric._labelnames:
            metric.labels(**{name: labels[name] for name in metric._labelnames})
            touched += 1
    assert touched >= 6
    metrics.forgotten(RUN)
    assert [line for line in exposed(metrics) if f'run="{RUN}"' in line] == []


def test_shared_series_stay_when_one_run_is_forgotten(metrics: Metrics):
    for number in range(MAX_RUNS + 3):
        metrics.round_completed(RoundRecord(f"job{number}", 0, 1, 0.0, 0.0))
    metrics.forgotten(f"job{MAX_RUNS + 1}")
    metrics.forgotten(OVERFLOW)
    assert value(metrics, "muster_rendezvous_rounds_total", run=OVERFLOW) == 3


def test_a_call_is_counted_and_timed(metrics: Metrics):
    labels = {"grpc_type": "unary", "grpc_service": "muster.v1.RunService", "grpc_method": "Get"}
    metrics.started("unary", "/muster.v1.RunService/Get")
    assert value(metrics, "grpc_server_started_total", **labels) == 1
    assert value(metrics, "grpc_server_handled_total", **labels, grpc_code="NotFound") is None
    metrics.handled("unary", "/muster.v1.RunService/Get", "NotFound", 0.003)
    assert value(metrics, "grpc_server_handled_total", **labels, grpc_code="NotFound") == 1
    assert value(metrics, "grpc_server_handling_seconds_sum", **labels) == 0.003


def test_every_observer_gets_every_event():
    class Observer:
        def __init__(self) -> None:
            self.calls: list[object] = []

        def decided(self, decision: object) -> None:
            self.calls.append(decision)

        def round_completed(self, record: object) -> None:
            self.calls.append(record)

        def noticed(self, notice: object) -> None:
            self.calls.append(notice)

        def forgotten(self, run_id: str) -> None:
            self.calls.append(run_id)

        def committed(self, seconds: float) -> None:
            self.calls.append(seconds)

    several = Observer(), Observer()
    every = Observers(*several)
    every.decided(records.decision())
    every.round_completed(RoundRecord(RUN, 7, 2, 0.0, 1.5))
    every.noticed(Notice("event", RUN, "text"))
    every.forgotten(RUN)
    every.committed(0.5)
    assert [one.calls for one in several] == [
        [records.decision(), RoundRecord(RUN, 7, 2, 0.0, 1.5), Notice("event", RUN, "text"), RUN, 0.5],
    ] * 2
