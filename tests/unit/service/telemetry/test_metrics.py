"""What /metrics shows."""

import pytest
from prometheus_client import generate_latest

from lab import records
from muster.service.core.retention.retention import USE_RECORD_INTERVAL, Retention
from muster.service.core.saving import PREFIX
from muster.service.core.store import KEY_BYTES
from muster.service.core.vocabulary.effects import Notice, RoundRecord
from muster.service.core.vocabulary.events import (
    CloseRun,
    Disconnected,
    Hello,
    ProcessInfo,
    RequestSave,
    StoreRequest,
    WriteReport,
)
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import Instant, Outcome
from muster.service.core.vocabulary.operations import Set
from muster.service.rpc.server import METHODS
from muster.service.telemetry.labels import OVERFLOW
from muster.service.telemetry.metrics import MAX_PREFIXES, MAX_RUNS, Metrics, Scrape, StateCollector
from muster.service.telemetry.observers import Observers
from muster.service.version import VERSION
from tests.support.world.core_client import CKPT
from tests.support.world.core_world import RUN, TTL, WALL, World
from tests.support.world.rendezvous_world import RendezvousWorld, nodes

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
    "muster_run_step": "gauge",
    "muster_run_step_spread": "gauge",
    "muster_run_still_seconds": "gauge",
    "muster_run_save_asked_seconds": "gauge",
    "muster_run_saved_step": "gauge",
    "muster_run_save_seconds": "gauge",
    "muster_checkpoint_committed_step": "gauge",
    "muster_checkpoint_age_seconds": "gauge",
    "muster_checkpoint_bytes": "gauge",
    "muster_checkpoint_write_seconds": "gauge",
    "muster_checkpoint_interval_seconds": "gauge",
    "muster_checkpoint_unsaved_seconds": "gauge",
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
JOB = {"run": RUN, "prefix": CKPT}


class WorldClock:
    """The world's time, as the collector reads it."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now(self) -> Instant:
        return Instant(self._world.now, WALL + self._world.now)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def world() -> World:
    return World(3)


def watch(metrics: Metrics, world: World) -> None:
    metrics.registry.register(StateCollector(world.coordinator, metrics, WorldClock(world)))


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def exposed(metrics: Metrics) -> list[str]:
    return generate_latest(metrics.registry).decode().splitlines()


def series(metrics: Metrics, name: str) -> list[str]:
    return [line for line in exposed(metrics) if line.startswith((f"{name}{{", f"{name} "))]


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


def test_what_has_no_labels_is_shown_at_zero(metrics: Metrics):
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


def test_a_barrier_without_arrivals_leaves_the_straggler_as_it_was(metrics: Metrics):
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


def letters(count: int) -> list[str]:
    """Names without digits, which would be folded."""
    return [f"{chr(97 + n % 26)}{chr(97 + n // 26)}" for n in range(count)]


def counts_of(metrics: Metrics, outcome: Outcome = Outcome.TIMED_OUT) -> list[str]:
    """The counts of decisions with one outcome: a series for each group."""
    lines = series(metrics, "muster_barrier_decisions_total")
    return [line for line in lines if f'outcome="{outcome.name}"' in line]


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


def test_the_prefixes_of_one_run_take_no_place_from_those_of_another(metrics: Metrics):
    for prefix in letters(100):
        metrics.decided(records.decision(run_id="odd", prefix=prefix))
    metrics.decided(records.decision(run_id=RUN, prefix="checkpoint"))
    assert value(metrics, "muster_barrier_wait_seconds_count", run=RUN, prefix="checkpoint") == 1


@pytest.mark.parametrize("prefix", ["save", "save/plan", "save/commit", "save/agreement", "save/sync"])
def test_the_groups_of_saves_have_their_series_however_many_others_there_are(metrics: Metrics, prefix: str):
    for name in letters(100):
        metrics.decided(records.decision(run_id=RUN, prefix=name))
    metrics.decided(records.decision(run_id=RUN, prefix=prefix))
    assert value(metrics, "muster_barrier_wait_seconds_count", run=RUN, prefix=prefix) == 1


def test_the_life_of_the_coordinator_is_shown(metrics: Metrics):
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


def test_the_series_of_a_forgotten_run_end_and_its_place_is_free_again(metrics: Metrics):
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


def test_what_was_counted_with_others_stays_when_one_of_them_is_forgotten(metrics: Metrics):
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


def test_all_observers_are_told_alike():
    class Observer:
        def __init__(self) -> None:
            self.told: list[object] = []

        def decided(self, decision: object) -> None:
            self.told.append(decision)

        def round_completed(self, record: object) -> None:
            self.told.append(record)

        def noticed(self, notice: object) -> None:
            self.told.append(notice)

        def forgotten(self, run_id: str) -> None:
            self.told.append(run_id)

        def committed(self, seconds: float) -> None:
            self.told.append(seconds)

    several = Observer(), Observer()
    every = Observers(*several)
    every.decided(records.decision())
    every.round_completed(RoundRecord(RUN, 7, 2, 0.0, 1.5))
    every.noticed(Notice("event", RUN, "text"))
    every.forgotten(RUN)
    every.committed(0.5)
    assert [one.told for one in several] == [
        [records.decision(), RoundRecord(RUN, 7, 2, 0.0, 1.5), Notice("event", RUN, "text"), RUN, 0.5],
    ] * 2


# ---------------------------------------------------------------------- the state


def members(metrics: Metrics, run: str = RUN) -> dict[str, float | None]:
    states = ("connected", "disconnected", "lost", "left", "idle")
    return {state: value(metrics, "muster_members", run=run, state=state) for state in states}


def test_the_state_is_counted_when_it_is_scraped(metrics: Metrics, world: World):
    watch(metrics, world)
    assert value(metrics, "muster_sessions", run=RUN) is None
    zero, one, two = world.ranks()
    assert value(metrics, "muster_sessions", run=RUN) == 3
    assert members(metrics) == {"connected": 3, "disconnected": 0, "lost": 0, "left": 0, "idle": 0}
    assert value(metrics, "muster_barriers_open", **JOB) == 0
    assert value(metrics, "muster_barrier_missing_ranks", **JOB) == 0

    zero.arrive()
    assert value(metrics, "muster_barriers_open", **JOB) == 1
    assert value(metrics, "muster_barrier_missing_ranks", **JOB) == 2

    one.lose_connection()
    assert value(metrics, "muster_sessions", run=RUN) == 2
    assert members(metrics) == {"connected": 2, "disconnected": 1, "lost": 0, "left": 0, "idle": 0}

    world.wait(TTL)
    assert members(metrics) == {"connected": 2, "disconnected": 0, "lost": 1, "left": 0, "idle": 0}
    assert value(metrics, "muster_barriers_open", **JOB) == 0
    assert value(metrics, "muster_barrier_missing_ranks", **JOB) == 0

    two.goodbye()
    assert members(metrics) == {"connected": 1, "disconnected": 0, "lost": 1, "left": 1, "idle": 0}
    assert value(metrics, "muster_sessions", run=RUN) == 1


def test_the_oldest_open_barrier_behind_one_label_shows_its_age_and_its_timeout(
    metrics: Metrics, world: World
):
    watch(metrics, world)
    zero, one, two = world.ranks()

    def oldest(prefix: str) -> tuple[float | None, float | None]:
        labels = {"run": RUN, "prefix": prefix}
        return (
            value(metrics, "muster_barrier_open_seconds", **labels),
            value(metrics, "muster_barrier_timeout_seconds", **labels),
        )

    assert oldest(CKPT) == (0, 0)
    zero.arrive("step-1", timeout=100)
    assert oldest("step-N") == (0, 100)
    world.wait(30)
    zero.arrive("step-2", timeout=200)
    world.wait(5)
    assert oldest("step-N") == (35, 100)
    one.arrive("step-1")
    two.arrive("step-1")
    assert oldest("step-N") == (5, 200)
    assert oldest(CKPT) == (0, 0)


def test_runs_are_counted_by_whether_they_are_closed(metrics: Metrics):
    world = RendezvousWorld(nodes(2))
    watch(metrics, world)
    assert [value(metrics, "muster_runs", state=state) for state in ("open", "closed")] == [0, 0]
    world.agent("a")
    world.agent("b", run="job2")
    world.close()
    assert [value(metrics, "muster_runs", state=state) for state in ("open", "closed")] == [1, 1]


def test_the_bounds_that_all_runs_share_are_shown_with_what_is_used(metrics: Metrics):
    world = World(
        2,
        limits=Limits(max_runs=5, max_sessions=7, max_total_store_bytes=900, max_total_gather_bytes=8),
        retention=Retention(),
    )
    watch(metrics, world)
    zero, one = world.start(0), world.start(1, run="job2")
    world.do(StoreRequest(world.new_session(), RUN, Set((("k", b"12"),))))
    zero.join(world_size=1)
    zero.arrive(payload=b"1234")
    used = {
        "max_runs": 2,
        "max_sessions": 2,
        "max_total_store_bytes": KEY_BYTES + 3,
        "max_total_gather_bytes": 4,
    }
    most = {"max_runs": 5, "max_sessions": 7, "max_total_store_bytes": 900, "max_total_gather_bytes": 8}
    assert {limit: value(metrics, "muster_limit", limit=limit) for limit in most} == most
    assert {limit: value(metrics, "muster_limit_used", limit=limit) for limit in used} == used
    # A run that has been closed and out of use for a while makes room, and is not in the way.
    for run in (RUN, "job2"):
        world.do(CloseRun(world.new_session(), run, "ann@desk", ""))
    zero.goodbye()
    world.wait(USE_RECORD_INTERVAL)
    assert value(metrics, "muster_limit_used", limit="max_runs") == 1
    assert value(metrics, "muster_limit_used", limit="max_sessions") == 1
    one.goodbye()
    assert value(metrics, "muster_limit_used", limit="max_runs") == 1
    world.wait(USE_RECORD_INTERVAL)
    assert value(metrics, "muster_limit_used", limit="max_runs") == 0


def test_the_counts_of_a_run_are_at_zero_before_anything_is_counted(metrics: Metrics, world: World):
    watch(metrics, world)
    world.ranks()
    exposed(metrics)
    assert value(metrics, "muster_rendezvous_rounds_total", run=RUN) == 0
    assert value(metrics, "muster_barrier_wait_seconds_count", **JOB) == 0
    for outcome in Outcome:
        assert value(metrics, "muster_barrier_decisions_total", **JOB, outcome=outcome.name) == 0


def test_a_rank_is_counted_once_by_its_newest_process(metrics: Metrics, world: World):
    watch(metrics, world)
    zero, *_ = world.ranks()
    zero.die()
    world.start(0)
    assert members(metrics) == {"connected": 3, "disconnected": 0, "lost": 0, "left": 0, "idle": 0}


def test_the_groups_and_runs_behind_one_label_are_added_up(metrics: Metrics):
    world = World(2)
    watch(metrics, world)
    zero, _ = world.ranks()
    for step in (1, 2, 3):
        zero.arrive(f"step-{step}")
    assert value(metrics, "muster_barriers_open", run=RUN, prefix="step-N") == 3
    assert value(metrics, "muster_barrier_missing_ranks", run=RUN, prefix="step-N") == 3
    world.watching = False
    for number in range(MAX_RUNS + 4):
        info = (ProcessInfo(0, "life", "node", 1),)
        world.do(Hello(world.new_session(), f"more-{number}", 0, info))
    assert value(metrics, "muster_sessions", run=OVERFLOW) == 5
    assert members(metrics, OVERFLOW)["connected"] == 5
    assert len(series(metrics, "muster_sessions")) == MAX_RUNS + 1


def crowd_of_closed_runs(world: World, count: int) -> None:
    """Runs that are over, each with one rank that was lost."""
    for number in range(count):
        session = world.new_session()
        world.do(Hello(session, f"over-{number}", 0, (ProcessInfo(0, "life", "node", 1),)))
        world.do(CloseRun(world.new_session(), f"over-{number}", "test", "it is over"))
        world.do(Disconnected(session))
    world.wait(TTL)


def test_a_run_that_is_in_use_has_its_name_whatever_has_been_before(metrics: Metrics):
    world = World(2)
    watch(metrics, world)
    world.watching = False
    crowd_of_closed_runs(world, MAX_RUNS)
    assert value(metrics, "muster_run_closed", run="over-0") == 1
    zero, _ = world.ranks()
    zero.arrive()
    assert members(metrics)["connected"] == 2
    assert value(metrics, "muster_barrier_missing_ranks", **JOB) == 1
    assert value(metrics, "muster_runs", state="closed") == MAX_RUNS
    assert len(series(metrics, "muster_run_closed")) == MAX_RUNS
    assert not [line for line in exposed(metrics) if 'run="over-0"' in line], "it gave its place"
    assert not [line for line in exposed(metrics) if f'run="{OVERFLOW}"' in line]


def test_runs_that_are_over_are_not_among_the_others(metrics: Metrics):
    world = World(2)
    watch(metrics, world)
    world.watching = False
    crowd_of_closed_runs(world, 10)
    for number in range(MAX_RUNS + 3):
        world.do(Hello(world.new_session(), f"job-{number}", 0, (ProcessInfo(0, "life", "node", 1),)))
    assert members(metrics, OVERFLOW) == {"connected": 3, "disconnected": 0, "lost": 0, "left": 0, "idle": 0}
    assert value(metrics, "muster_run_closed", run=OVERFLOW) is None
    assert len(series(metrics, "muster_run_closed")) == MAX_RUNS


def test_a_run_whose_place_was_taken_starts_anew_when_it_comes_back(metrics: Metrics):
    world = World(2)
    watch(metrics, world)
    world.watching = False
    zero, one = world.ranks()
    metrics.decided(records.decision(run_id=RUN, prefix=CKPT))
    assert value(metrics, "muster_barrier_wait_seconds_count", **JOB) == 1
    zero.die()
    one.die()
    world.wait(TTL)
    assert members(metrics)["lost"] == 2
    crowd = [world.new_session() for _ in range(MAX_RUNS)]
    for number, session in enumerate(crowd):
        world.do(Hello(session, f"job-{number}", 0, (ProcessInfo(0, "life", "node", 1),)))
    assert members(metrics)["lost"] is None
    assert value(metrics, "muster_barrier_wait_seconds_count", **JOB) is None
    world.do(Disconnected(crowd[0]))
    world.wait(TTL)
    world.start(0)
    assert members(metrics)["connected"] == 1
    assert value(metrics, "muster_barrier_wait_seconds_count", **JOB) == 0


def test_the_nodes_that_wait_for_a_round_are_counted(metrics: Metrics):
    world = RendezvousWorld(nodes(2))
    watch(metrics, world)

    def waiting() -> float | None:
        return value(metrics, "muster_rendezvous_waiting_nodes", run=RUN)

    a = world.agent("a")
    assert waiting() == 1
    b, _ = world.several("b", "stands by")
    assert waiting() == 0
    b.leave()
    assert waiting() == 1
    a.leave()
    assert waiting() == 1
    world.agent("c")
    assert waiting() == 0


def test_a_scrape_shows_the_state_as_it_was_taken_and_looks_at_it_no_more(metrics: Metrics, world: World):
    taken = Scrape(StateCollector(world.coordinator, metrics, WorldClock(world)), metrics.registry)
    world.ranks()
    metrics.began(epoch=7, at=1.0)
    lines = generate_latest(taken).decode().splitlines()
    assert "muster_coordinator_epoch 7.0" in lines
    assert 'muster_runs{state="open"} 0.0' in lines
    assert not [line for line in lines if "run=" in line]


def test_a_closed_run_is_shown_as_such(metrics: Metrics):
    world = RendezvousWorld(nodes(2))
    watch(metrics, world)
    world.agent("a")
    world.agent("b", run="job2")
    assert value(metrics, "muster_run_closed", run=RUN) == 0
    world.close()
    assert value(metrics, "muster_run_closed", run=RUN) == 1
    assert value(metrics, "muster_run_closed", run="job2") == 0
    assert value(metrics, "muster_rendezvous_waiting_nodes", run=RUN) == 0


def test_how_far_a_run_has_come_is_shown_of_ranks_that_tell_it_and_are_there(metrics: Metrics):
    world = World(2)
    watch(metrics, world)
    zero, one = world.ranks()
    names = "muster_run_step", "muster_run_step_spread", "muster_run_still_seconds"
    assert [value(metrics, name, run=RUN) for name in names] == [None] * 3
    zero.step(120)
    world.now += 30.0
    one.step(118)
    world.now += 12.0
    one.step(118)
    assert [value(metrics, name, run=RUN) for name in names] == [120, 2, 12]
    one.lose_connection()
    assert [value(metrics, name, run=RUN) for name in names] == [120, 0, 42]
    zero.goodbye()
    assert [value(metrics, name, run=RUN) for name in names] == [None] * 3


def test_a_save_that_all_ranks_are_asked_for_is_shown_until_they_have_made_it(metrics: Metrics):
    world = World(1)
    watch(metrics, world)
    (zero,) = world.ranks(prefix=PREFIX)
    names = "muster_run_save_asked_seconds", "muster_run_saved_step", "muster_run_save_seconds"
    assert [value(metrics, name, run=RUN) for name in names] == [None] * 3
    world.do(RequestSave(world.new_session(), RUN, False, "ann", ""))
    world.now += 5.0
    assert [value(metrics, name, run=RUN) for name in names] == [5, None, None]
    zero.arrive(PREFIX, payload=b"agree 9 1 0")
    world.now += 2.0
    zero.arrive(PREFIX, payload=b"done 9 1 0")
    assert [value(metrics, name, run=RUN) for name in names] == [None, 9, 7]


CHECKPOINT = {
    name: f"muster_checkpoint_{name}"
    for name in (
        "committed_step",
        "age_seconds",
        "bytes",
        "write_seconds",
        "interval_seconds",
        "unsaved_seconds",
    )
}


def checkpoint_of(metrics: Metrics, run: str = RUN) -> dict[str, float]:
    """What is shown of a run's checkpoints; what is absent is left out."""
    shown = {name: value(metrics, metric, run=run) for name, metric in CHECKPOINT.items()}
    return {name: number for name, number in shown.items() if number is not None}


def test_newest_checkpoint_of_a_run_is_shown_with_its_age(metrics: Metrics):
    world = World(1)
    watch(metrics, world)
    (zero,) = world.ranks(prefix="save")
    assert checkpoint_of(metrics) == {}
    for step in (10, 20, 30):
        world.now += 60
        zero.arrive("save", report=WriteReport(step=step, bytes=2**40, seconds=12.5, commits=True))
    world.now += 5
    assert checkpoint_of(metrics) == pytest.approx(
        {
            "committed_step": 30,
            "age_seconds": 5,
            "bytes": 2**40,
            "write_seconds": 12.5,
            "interval_seconds": 60,
            "unsaved_seconds": 5,
        }
    )
    zero.goodbye()
    world.now += 60
    assert checkpoint_of(metrics)["age_seconds"] == pytest.approx(65)
    assert "unsaved_seconds" not in checkpoint_of(metrics), "nobody is there who could save"


def test_what_no_rank_told_of_a_checkpoint_is_absent_and_not_zero(metrics: Metrics):
    world = World(1)
    watch(metrics, world)
    (zero,) = world.ranks(prefix="save")
    zero.arrive("save", failure="no", report=WriteReport(step=1))
    assert checkpoint_of(metrics) == {}
    zero.arrive("save", report=WriteReport(commits=True))
    assert checkpoint_of(metrics) == {"age_seconds": 0, "unsaved_seconds": 0}


def test_checkpoints_of_runs_without_a_label_of_their_own_are_not_shown(metrics: Metrics):
    world = World(1)
    watch(metrics, world)
    other = world.start(0, run=OVERFLOW)
    other.join("save")
    other.arrive("save", report=WriteReport(step=1, bytes=1, seconds=1.0, commits=True))
    assert checkpoint_of(metrics, OVERFLOW) == {}


def test_an_evicted_rank_is_counted_as_such(metrics: Metrics):
    world = RendezvousWorld()
    watch(metrics, world)
    world.start(0)
    world.evict(0)
    assert value(metrics, "muster_members", run=RUN, state="evicted") == 1
    assert value(metrics, "muster_members", run=RUN, state="connected") == 0
