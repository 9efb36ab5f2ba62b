"""Invariant 31 (only unused runs are removed)."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from muster.service.core.retention.retention import (
    MAX_RUNS_PER_REVIEW,
    REVIEW_PAUSE,
    USE_RECORD_INTERVAL,
    Retention,
)
from muster.service.core.vocabulary.effects import Effects, Refused, RunForgotten
from muster.service.core.vocabulary.events import (
    CloseRun,
    Disconnected,
    Forget,
    Hello,
    ProcessInfo,
    StoreRequest,
    Tick,
)
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import Outcome
from muster.service.core.vocabulary.operations import Check, OperationId, Set, Wait
from muster.service.core.vocabulary.records import RunRecord
from muster.service.core.vocabulary.refusal import Reason
from tests.support.expect import some
from tests.support.world.core_client import TIMEOUT
from tests.support.world.core_world import RUN, TTL, World
from tests.support.world.rendezvous_world import RendezvousWorld, nodes

DAY = 86_400.0
CLOSED, IDLE = DAY, 7 * DAY
KEEP = Retention(closed=CLOSED, idle=IDLE)


def close(world: World, run: str = RUN, *, create: bool = False) -> None:
    world.do(CloseRun(world.new_session(), run, "ann@desk", "", create=create))


def forgotten_after(world: World, run: str = RUN) -> float | None:
    """Seconds from now until the run is forgotten, by the coordinator's own deadlines."""
    begin = world.now
    while run in world.coordinator.runs:
        if world.coordinator.next_deadline() is None:
            return None
        world.tick()
    assert not [key for key in world.disk.kept if key[1] == run], "something of it is on disk still"
    return world.now - begin


@pytest.fixture
def world() -> World:
    return World(2, retention=KEEP)


# ---------------------------------------------------------------------- when


def test_idle_run_is_forgotten_after_its_time(world: World):
    zero, one = world.ranks()
    zero.arrive()
    one.arrive()
    world.wait(3 * IDLE)
    assert RUN in world.coordinator.runs, "they are connected"
    zero.goodbye()
    one.goodbye()
    assert forgotten_after(world) == IDLE
    (notice,) = world.last.notices
    assert (notice.event, notice.run_id) == ("run.forgotten", RUN)
    assert notice.message == "run job1 was forgotten: nobody has used it for 7 days"
    assert world.last.forgotten == [RUN]


def test_closed_run_is_forgotten_sooner(world: World):
    zero = world.start(0)
    zero.goodbye()
    world.wait(DAY / 2)
    close(world)
    assert forgotten_after(world) == CLOSED
    assert "closed, and nobody has used it for 24 h" in world.last.notices[0].message


def test_finished_run_makes_room_for_a_new_one():
    world = World(2, limits=Limits(max_runs=3), retention=KEEP)
    for run in ("first", "second", "third"):
        world.start(0, run=run).goodbye()
        world.wait(60)
    refused = "3 runs are known already, and none has been closed and out of use for ten minutes"
    assert refused in world.refused(hello(world, "new")).refusal.message
    busy = world.start(0, run="first")
    for run in ("first", "third", "second"):
        close(world, run)
        world.wait(60)
    # A process that may come back has the time to.
    assert refused in world.refused(hello(world, "new")).refusal.message
    world.wait(USE_RECORD_INTERVAL - 120)
    world.do(hello(world, "new"))
    # Not the one that is in use, and of the others the one that was closed first.
    assert world.coordinator.runs.keys() == {"first", "second", "new"}
    assert not [key for key in world.disk.kept if key[1] == "third"]
    (notice,) = (notice for notice in world.last.notices if notice.event == "run.forgotten")
    assert notice.message == (
        "run third was forgotten: it was closed, and a new run needed its place (max_runs is 3)"
    )
    busy.goodbye()
    world.wait(60)
    close(world, "later", create=True)
    assert world.coordinator.runs.keys() == {"first", "new", "later"}


def test_after_a_restart_no_run_makes_room_before_everyone_could_come_back():
    world = World(2, limits=Limits(max_runs=1), retention=KEEP)
    worker = world.start(0)
    close(world)
    world.wait(2 * USE_RECORD_INTERVAL)
    world.crash()
    world.wait(USE_RECORD_INTERVAL - 1)
    assert world.refused(hello(world, "new")).refusal.reason is Reason.LIMIT_EXCEEDED
    worker.connect()
    world.wait(2 * USE_RECORD_INTERVAL)
    assert world.refused(hello(world, "new")).refusal.reason is Reason.LIMIT_EXCEEDED
    worker.goodbye()
    world.wait(USE_RECORD_INTERVAL)
    world.do(hello(world, "new"))
    assert world.coordinator.runs.keys() == {"new"}


def test_closed_run_that_is_kept_for_ever_makes_no_room():
    world = World(2, limits=Limits(max_runs=1), retention=Retention(closed=0, idle=IDLE))
    world.start(0).goodbye()
    close(world)
    assert world.refused(hello(world, "new")).refusal.reason is Reason.LIMIT_EXCEEDED


def hello(world: World, run: str) -> Hello:
    return Hello(world.new_session(), run, 0, (ProcessInfo(0, "p", "node-0", 1),))


def test_closed_run_is_kept_while_someone_is_connected(world: World):
    zero = world.start(0)
    close(world)
    world.wait(5 * CLOSED)
    zero.goodbye()
    assert forgotten_after(world) == CLOSED


@pytest.mark.parametrize("closed", [True, False])
def test_zero_keeps_for_ever(closed: bool):
    keep = Retention(closed=0.0, idle=IDLE) if closed else Retention(closed=CLOSED, idle=0.0)
    world = World(retention=keep)
    world.start(0).goodbye()
    if closed:
        close(world)
    assert forgotten_after(world) is None
    world.crash()
    assert forgotten_after(world) is None


def test_session_ttl_runs_first():
    world = World(retention=Retention(closed=1.0, idle=1.0))
    world.start(0).lose_connection()
    assert forgotten_after(world) == TTL


def test_call_that_waits_for_keys_is_a_use(world: World):
    call = world.new_session()
    world.do(StoreRequest(call, RUN, Wait(("key",), 0)))
    world.wait(3 * IDLE)
    assert RUN in world.coordinator.runs
    world.do(Disconnected(call))
    assert forgotten_after(world) == IDLE


def test_using_the_store_is_a_use(world: World):
    for _ in range(4):
        world.do(StoreRequest(world.new_session(), RUN, Set((("key", b"1"),), OperationId("c", 1))))
        world.wait(0.9 * IDLE)
    world.do(StoreRequest(world.new_session(), RUN, Check(("key",))))
    assert forgotten_after(world) == IDLE


def test_open_barrier_with_an_arrival_is_a_use():
    world = World(2, retention=Retention(closed=1.0, idle=1.0))
    call = world.call(0)
    world.hang_up(call)
    world.wait(TIMEOUT - 1)
    assert RUN in world.coordinator.runs, "its arrival waits for the other rank"
    world.wait(1)
    assert world.disk.decided[RUN, "checkpoint"][-1].outcome is Outcome.TIMED_OUT
    assert forgotten_after(world) == 1.0


def test_place_in_the_rendezvous_is_a_use():
    world = RendezvousWorld(nodes(1), retention=Retention(closed=1.0, idle=1.0))
    a = world.agent("a")
    world.wait(3 * DAY)
    assert RUN in world.coordinator.runs
    a.lose_stream()
    keep_alive = a.settings.keep_alive_timeout
    assert forgotten_after(world) == keep_alive


def test_session_of_a_past_generation_keeps_nothing_and_does_no_harm(world: World):
    old = world.start(0)
    new = world.start(0, generation=1)
    new.goodbye()
    assert forgotten_after(world) == IDLE
    again = world.start(0)
    old.lose_connection()
    world.wait(2 * IDLE)
    assert world.coordinator.runs[RUN].in_use
    again.goodbye()
    assert forgotten_after(world) == IDLE


def test_process_of_an_old_generation_may_outlive_its_run():
    world = World(retention=Retention(closed=1.0, idle=1.0))
    world.start(0).lose_connection()
    world.start(0, generation=1).goodbye()
    assert forgotten_after(world) == 1.0
    world.wait(2 * TTL)
    assert world.coordinator.next_deadline() is None


# ---------------------------------------------------------------------- what is left


def test_id_of_a_forgotten_run_is_free_again(world: World):
    zero, one = world.ranks()
    zero.arrive()
    one.arrive()
    zero.goodbye()
    one.goodbye()
    close(world)
    assert forgotten_after(world) == CLOSED
    world.watching = False
    two, three = world.ranks()
    two.arrive()
    assert some(three.arrive()).sequence == 0
    assert world.coordinator.runs[RUN].closed is None


def test_nothing_holds_a_forgotten_run(world: World):
    """Neither a timer of a week nor one of a barrier's timeout."""
    zero, one = world.ranks()
    zero.arrive(timeout=30 * DAY)
    one.arrive(timeout=30 * DAY)
    zero.goodbye()
    one.die()
    close(world)
    assert forgotten_after(world) == CLOSED
    assert world.coordinator.next_deadline() is None or world.coordinator.reaper._reviews._armed == {}
    assert world.coordinator._timers._armed == {}


def test_planned_review_does_not_keep_a_forgotten_run_in_memory(world: World):
    for number in range(300):
        world.do(StoreRequest(world.new_session(), f"job{number}", Set((("key", b"1"),))))
        close(world, f"job{number}")
    world.wait(2 * CLOSED)
    assert not world.coordinator.runs
    assert len(world.coordinator.reaper._reviews._heap) < 100


def test_process_of_a_forgotten_run_is_refused(world: World):
    zero, one = world.ranks()
    zero.arrive()
    one.arrive()
    one.goodbye()
    zero.stream_breaks()
    world.coordinator_sees_it(zero)
    assert forgotten_after(world) == IDLE
    world.watching = False
    zero.connect()
    zero.arrive()
    assert zero.reason is Reason.SEQUENCE_AHEAD


# ---------------------------------------------------------------------- many


def test_many_are_forgotten_a_few_at_a_time(world: World):
    many = 3 * MAX_RUNS_PER_REVIEW + 7
    for number in range(many):
        close(world, f"job{number}", create=True)
    steps = []
    while world.coordinator.runs:
        world.tick()
        steps.append((world.now, len(world.last.forgotten)))
    assert [count for _, count in steps] == [MAX_RUNS_PER_REVIEW] * 3 + [7]
    begin = steps[0][0]
    assert [at - begin for at, _ in steps] == pytest.approx(
        [0, REVIEW_PAUSE, 2 * REVIEW_PAUSE, 3 * REVIEW_PAUSE]
    )


def test_tick_for_something_else_does_not_hurry_them(world: World):
    for number in range(2 * MAX_RUNS_PER_REVIEW):
        close(world, f"job{number}", create=True)
    world.tick()
    world.do(Tick())
    assert world.last == Effects()
    assert len(world.coordinator.runs) == MAX_RUNS_PER_REVIEW


# ---------------------------------------------------------------------- restarts


def test_coordinator_that_is_restarted_daily_forgets(world: World):
    world.start(0).goodbye()
    call = world.call(1)
    world.hang_up(call)
    days = 0
    while RUN in world.coordinator.runs:
        world.wait(DAY)
        world.crash()
        days += 1
    assert days == 7


def test_restart_leaves_everyone_time_to_come_back(world: World):
    world.start(0).goodbye()
    world.now += 100 * IDLE
    world.crash()
    assert forgotten_after(world) == USE_RECORD_INTERVAL


def test_run_record_of_an_older_version_gets_its_time_at_the_start(world: World):
    world.disk.kept[RunRecord, RUN] = RunRecord(RUN, 3)
    world.crash()
    world.wait(DAY)
    (record,) = world.disk.of_kind(RunRecord)
    assert record.active_at is not None
    world.crash()
    assert forgotten_after(world) == IDLE - DAY


def test_wrong_wall_clock_delays_no_removal_beyond_the_retention_time(world: World):
    world.disk.kept[RunRecord, RUN] = RunRecord(RUN, 3, active_at=4e9)
    world.crash()
    assert forgotten_after(world) == IDLE


def test_uses_are_written_down_now_and_then_and_not_each_time(world: World):
    operation = Set((("key", b"1"),))
    written = 0
    for _ in range(100):
        world.do(StoreRequest(world.new_session(), RUN, operation))
        written += any(isinstance(record, RunRecord) for record in world.last.records)
        world.wait(USE_RECORD_INTERVAL / 10)
    assert written == 10


# ---------------------------------------------------------------------- any order


SHORT = Retention(closed=900.0, idle=3_600.0)
RUNS = ("a", "b", "c")
runs = st.sampled_from(RUNS)


class Use(RuleBasedStateMachine):
    """Runs are used in any order, and a model says how long each must and may be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(retention=SHORT)
        self.sessions: dict[int, str] = {}
        """Open streams of processes."""
        self.waits: dict[int, str] = {}
        """Calls that wait for keys."""
        self.last: dict[str, float] = {}
        """When each run that is known was last used."""
        self.closed: set[str] = set()
        self.started = self.world.now

    # ------------------------------------------------------------------ using

    def touch(self, run: str) -> None:
        self.last[run] = self.world.now

    @rule(run=runs, rank=st.integers(0, 2))
    def a_process_connects(self, run: str, rank: int) -> None:
        session = self.world.new_session()
        info = ProcessInfo(rank, f"life-{session}", "node", 1)
        answers = self.world.ask(Hello(session, run, 0, (info,)))
        if not any(isinstance(answer, Refused) for answer in answers):
            self.sessions[session] = run
            self.touch(run)

    @rule(run=runs)
    def a_call_waits(self, run: str) -> None:
        session = self.world.new_session()
        self.world.do(StoreRequest(session, run, Wait(("never",), 0)))
        self.waits[session] = run
        self.touch(run)

    @rule(run=runs)
    def a_key_is_set(self, run: str) -> None:
        self.world.do(StoreRequest(self.world.new_session(), run, Set((("key", b"1"),))))
        self.touch(run)

    @rule(pick=st.integers(0, 99))
    def someone_leaves(self, pick: int) -> None:
        everyone = self.sessions | self.waits
        if everyone:
            session = sorted(everyone)[pick % len(everyone)]
            self.world.do(Disconnected(session))
            self.touch(everyone[session])
            self.sessions.pop(session, None)
            self.waits.pop(session, None)

    @rule(run=runs)
    def it_is_closed(self, run: str) -> None:
        close(self.world, run, create=True)
        self.closed.add(run)
        self.touch(run)

    @rule(run=runs, force=st.booleans())
    def an_operator_forgets(self, run: str, force: bool) -> None:
        used = {session for session, its in (self.sessions | self.waits).items() if its == run}
        effects = self.world.do(event := Forget(self.world.new_session(), run, force))
        messages = {session: one.message for one in effects.deliveries for session in one.audience}
        if not isinstance(messages.pop(event.session), RunForgotten):
            assert run not in self.last or not force
            assert not messages
            return
        assert force or not used
        assert used <= messages.keys()
        self.sessions = {session: its for session, its in self.sessions.items() if its != run}
        self.waits = {session: its for session, its in self.waits.items() if its != run}
        del self.last[run]
        self.closed.discard(run)

    @rule(seconds=st.sampled_from([1.0, TTL, 300.0, 899.0, 1_800.0, 4_000.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule(away=st.sampled_from([0.0, 700.0, 10_000.0]))
    def the_coordinator_restarts(self, away: float) -> None:
        self.world.now += away
        self.world.crash()
        self.sessions.clear()
        self.waits.clear()
        self.started = self.world.now

    # ------------------------------------------------------------------ judging

    @invariant()
    def each_is_kept_as_long_as_it_must_be_and_no_longer(self) -> None:
        now, known = self.world.now, self.world.coordinator.runs.keys()
        in_use = set(self.sessions.values()) | set(self.waits.values())
        for run, last in list(self.last.items()):
            keep = SHORT.closed if run in self.closed else SHORT.idle
            grace = min(keep, USE_RECORD_INTERVAL)
            if run in in_use:
                assert run in known
            elif run not in known:
                # What was written down of its last use may be as old as that; but nobody loses it at a start.
                restarted = self.started >= last
                assert now >= (
                    max(last + keep - USE_RECORD_INTERVAL, self.started + grace) if restarted else last + keep
                )
                del self.last[run]
                self.closed.discard(run)
            else:
                assert now < max(last + keep, self.started + grace) + TTL + 3 * REVIEW_PAUSE
        assert known <= self.last.keys()

    @invariant()
    def what_is_known_is_on_disk_and_nothing_else(self) -> None:
        on_disk = {key[1] for key in self.world.disk.kept}
        assert on_disk == set(self.world.coordinator.runs)


TestUse = Use.TestCase
TestUse.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
