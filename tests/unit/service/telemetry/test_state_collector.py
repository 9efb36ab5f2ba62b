"""Gauges that are read from the state at each scrape."""

import pytest
from prometheus_client import generate_latest

from lab import records
from muster.client.save_votes import PREFIX
from muster.service.core.retention.retention import USE_RECORD_INTERVAL, Retention
from muster.service.core.store import KEY_BYTES
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
from muster.service.core.vocabulary.model import Outcome
from muster.service.core.vocabulary.operations import Set
from muster.service.telemetry.labels import OVERFLOW
from muster.service.telemetry.metrics import MAX_RUNS, Metrics
from muster.service.telemetry.state_collector import Scrape, StateCollector
from tests.support.world.core_client import CKPT
from tests.support.world.core_world import RUN, TTL, World
from tests.support.world.rendezvous_world import RendezvousWorld, nodes
from tests.unit.service.telemetry.scraping import (
    JOB,
    WorldClock,
    exposed,
    series,
    value,
    watch,
)


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


def test_label_shows_age_and_timeout_of_its_oldest_open_barrier(metrics: Metrics, world: World):
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


def test_shared_limits_are_shown_with_their_use(metrics: Metrics):
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


def test_counts_of_a_run_start_at_zero(metrics: Metrics, world: World):
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


def test_run_in_use_has_its_name_after_many_closed_runs(metrics: Metrics):
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


def test_closed_runs_are_not_counted_as_other(metrics: Metrics):
    world = World(2)
    watch(metrics, world)
    world.watching = False
    crowd_of_closed_runs(world, 10)
    for number in range(MAX_RUNS + 3):
        world.do(Hello(world.new_session(), f"job-{number}", 0, (ProcessInfo(0, "life", "node", 1),)))
    assert members(metrics, OVERFLOW) == {"connected": 3, "disconnected": 0, "lost": 0, "left": 0, "idle": 0}
    assert value(metrics, "muster_run_closed", run=OVERFLOW) is None
    assert len(series(metrics, "muster_run_closed")) == MAX_RUNS


def test_run_counts_from_zero_when_it_returns_after_its_place_was_taken(metrics: Metrics):
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


def test_nodes_that_wait_for_a_round_are_counted(metrics: Metrics):
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


def test_scrape_keeps_the_state_as_it_was_taken(metrics: Metrics, world: World):
    taken = Scrape(StateCollector(world.coordinator, metrics, WorldClock(world)), metrics.registry)
    world.ranks()
    metrics.began(epoch=7, at=1.0)
    lines = generate_latest(taken).decode().splitlines()
    assert "muster_coordinator_epoch 7.0" in lines
    assert 'muster_runs{state="open"} 0.0' in lines
    assert not [line for line in lines if "run=" in line]


def test_closed_run_is_shown_as_closed(metrics: Metrics):
    world = RendezvousWorld(nodes(2))
    watch(metrics, world)
    world.agent("a")
    world.agent("b", run="job2")
    assert value(metrics, "muster_run_closed", run=RUN) == 0
    world.close()
    assert value(metrics, "muster_run_closed", run=RUN) == 1
    assert value(metrics, "muster_run_closed", run="job2") == 0
    assert value(metrics, "muster_rendezvous_waiting_nodes", run=RUN) == 0


def test_steps_of_a_run_count_connected_ranks_that_report_them(metrics: Metrics):
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


def test_requested_save_is_shown_until_all_ranks_are_done(metrics: Metrics):
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


def test_time_until_the_deadline_of_a_requested_save_is_shown_until_it_is_done(metrics: Metrics):
    world = World(1)
    watch(metrics, world)
    (zero,) = world.ranks(prefix=PREFIX)
    name = "muster_run_save_left_seconds"
    world.do(RequestSave(world.new_session(), RUN, False, "ann", ""))
    assert value(metrics, name, run=RUN) is None, "it has no deadline"
    world.do(RequestSave(world.new_session(), RUN, False, "ann", "", deadline=60.0))
    assert value(metrics, name, run=RUN) == pytest.approx(60)
    world.now += 45.0
    assert value(metrics, name, run=RUN) == pytest.approx(15)
    world.now += 20.0
    zero.arrive(PREFIX, payload=b"agree 9 1 0")
    assert value(metrics, name, run=RUN) == pytest.approx(-5)
    zero.arrive(PREFIX, payload=b"done 9 1 0")
    assert value(metrics, name, run=RUN) is None


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


def test_unreported_values_of_a_checkpoint_are_absent(metrics: Metrics):
    world = World(1)
    watch(metrics, world)
    (zero,) = world.ranks(prefix="save")
    zero.arrive("save", failure="no", report=WriteReport(step=1))
    assert checkpoint_of(metrics) == {}
    zero.arrive("save", report=WriteReport(commits=True))
    assert checkpoint_of(metrics) == {"age_seconds": 0, "unsaved_seconds": 0}


def test_checkpoints_of_runs_without_own_label_are_not_shown(metrics: Metrics):
    world = World(1)
    watch(metrics, world)
    other = world.start(0, run=OVERFLOW)
    other.join("save")
    other.arrive("save", report=WriteReport(step=1, bytes=1, seconds=1.0, commits=True))
    assert checkpoint_of(metrics, OVERFLOW) == {}


def test_evicted_rank_is_counted_as_evicted(metrics: Metrics):
    world = RendezvousWorld()
    watch(metrics, world)
    world.start(0)
    world.evict(0)
    assert value(metrics, "muster_members", run=RUN, state="evicted") == 1
    assert value(metrics, "muster_members", run=RUN, state="connected") == 0


def test_stopped_run_is_neither_open_nor_closed(metrics: Metrics):
    world = World(2)
    watch(metrics, world)
    clients = world.ranks(prefix=PREFIX)
    assert value(metrics, "muster_run_stopped", run=RUN) == 0
    world.do(RequestSave(world.new_session(), RUN, True, "ann", ""))
    for phase in ("agree", "done"):
        for client in clients:
            client.arrive(PREFIX, payload=f"{phase} 9 1 1".encode())
    assert value(metrics, "muster_run_stopped", run=RUN) == 1
    assert value(metrics, "muster_run_closed", run=RUN) == 0
    assert {state: value(metrics, "muster_runs", state=state) for state in ("open", "stopped", "closed")} == {
        "open": 0,
        "stopped": 1,
        "closed": 0,
    }
