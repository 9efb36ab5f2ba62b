"""Invariant 2 (durable before delivered), and the driver's steps, on an engine that is held at will."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from lab.patience import PATIENCE
from muster.service.clock import Clock, SystemClock
from muster.service.core import barrier_views
from muster.service.core.barriers.group import Group
from muster.service.core.coordinator import Coordinator
from muster.service.core.elapsed import RECONNECT_GRACE
from muster.service.core.retention.retention import FOR_EVER, Retention
from muster.service.core.vocabulary.effects import (
    NO_RANKS,
    GroupJoined,
    GroupRecord,
    Inspect,
    Message,
    Notice,
    ProbeRequest,
    Progress,
    RoundComplete,
    RoundRecord,
    Standing,
    Welcome,
)
from muster.service.core.vocabulary.events import (
    Arrival,
    Arrive,
    Disconnected,
    Goodbye,
    Hello,
    JoinGroup,
    JoinRendezvous,
    ProcessInfo,
)
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import Decision, Instant, NodeInfo, Outcome, RendezvousSettings
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.driver import MAX_PUT_OFF, Driver, Outgoing
from muster.service.rpc.codec import encode_session_message
from muster.service.storage import codec
from muster.service.storage.engine import Engine, LeadLostError, StorageError
from muster.service.storage.memory import MemoryEngine
from tests.support.expect import of_kind
from tests.support.world.held_engine import Commit, HeldEngine
from tests.support.world.virtual_time import START, WALL, LoopClock, VirtualTimeLoop, in_virtual_time

T = TypeVar("T")

CKPT = "checkpoint"
TTL = 10.0


# ---------------------------------------------------------------------- the world around the driver


class CountingEngine(MemoryEngine):
    """Remembers its commits, and fails at the one that it is told."""

    def __init__(self, fail_at: int = 0) -> None:
        super().__init__()
        self.commits: list[Commit] = []
        self._fail_at = fail_at

    def commit(self, writes: Mapping[bytes, bytes | None], cleared: Sequence[bytes] = ()) -> None:
        self.commits.append(Commit(dict(writes), list(cleared)))
        if len(self.commits) == self._fail_at:
            raise StorageError("the disk is full")
        super().commit(writes, cleared)


class Recorder:
    """The driver's observer."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.rounds: list[RoundRecord] = []
        self.notices: list[Notice] = []
        self.forgotten_runs: list[str] = []
        self.commits = 0

    def decided(self, decision: Decision) -> None:
        self.decisions.append(decision)

    def round_completed(self, record: RoundRecord) -> None:
        self.rounds.append(record)

    def noticed(self, notice: Notice) -> None:
        self.notices.append(notice)

    def forgotten(self, run_id: str) -> None:
        self.forgotten_runs.append(run_id)

    def committed(self, seconds: float) -> None:
        assert seconds >= 0
        self.commits += 1


class Rank:
    """A process of the run "job", and what it has been told."""

    def __init__(self, driver: Driver, rank: int, world_size: int = 2, ordinal: int = 0) -> None:
        self.driver = driver
        self.rank = rank
        self.world_size = world_size
        self.ordinal = ordinal
        self.told: list[Message] = []
        self.data: list[bytes] = []
        self._changed = asyncio.Event()
        self.id = driver.connect(self)

    def deliver(self, outgoing: Outgoing, ranks: AbstractSet[int] = NO_RANKS) -> None:
        self.told.append(outgoing.message)
        self.data.append(outgoing.data)
        self._changed.set()

    def hello(self) -> "Rank":
        info = ProcessInfo(self.rank, f"life-{self.rank}", "node", 100 + self.rank, self.ordinal)
        self.driver.submit(Hello(self.id, "job", 0, (info,)))
        self.driver.submit(JoinGroup(self.id, CKPT, self.world_size))
        return self

    def arrive(self, sequence: int = 0, timeout: float = 300.0, failure: str | None = None) -> "Rank":
        arrival = Arrival(self.rank, failure=failure)
        self.driver.submit(Arrive(self.id, CKPT, sequence, timeout, (arrival,)))
        return self

    @property
    def heard(self) -> list[type]:
        return [type(message) for message in self.told]

    async def hears(self, kind: type[T]) -> T:
        """Wait until it has been told such a message; the newest."""
        while not (found := [message for message in self.told if isinstance(message, kind)]):
            self._changed.clear()
            await self._changed.wait()
        return found[-1]


@asynccontextmanager
async def driving(
    engine: Engine,
    observer: Recorder | None = None,
    encode: Callable[[Message], bytes] = encode_session_message,
    clock: Clock | None = None,
    retention: Retention = FOR_EVER,
) -> AsyncIterator[Driver]:
    driver = Driver(
        engine,
        clock=clock or SystemClock(),
        observer=observer or Recorder(),
        encode=encode,
        session_ttl=TTL,
        limits=Limits(),
        retention=retention,
    )
    try:
        yield driver
    finally:
        if isinstance(engine, HeldEngine):
            engine.free = True
            while not engine.begun.empty():
                engine.begun.get_nowait().end()
        await driver.close()


def join(driver: Driver, round: int | None = None) -> Rank:
    """A node that is a round alone; it comes back to that round."""
    node = Rank(driver, 0)
    asked = RendezvousSettings(
        min_nodes=1, max_nodes=1, join_timeout=60.0, last_call_timeout=30.0, keep_alive_timeout=15.0
    )
    info = NodeInfo("life", "node", 1)
    driver.submit(JoinRendezvous(node.id, "job", info, 1, asked, round))
    return node


async def settle() -> None:
    """Let the loop do all that it can do without waiting for a commit."""
    for _ in range(20):
        await asyncio.sleep(0)


async def runs(driver: Driver) -> list[str]:
    return await driver.query(lambda core, _: list(core.runs))


# ---------------------------------------------------------------------- 1 and 2: batches


async def test_events_are_taken_in_the_order_in_which_they_came():
    async with driving(CountingEngine()) as driver:
        rank = Rank(driver, 0, world_size=1)
        rank.arrive(0).hello().arrive(0).arrive(1)
        await settle()
        assert [type(message).__name__ for message in rank.told] == [
            "Refused",
            "Welcome",
            "GroupJoined",
            "Decision",
            "Decision",
        ]
        assert [m.sequence for m in rank.told if isinstance(m, Decision)] == [0, 1]


async def test_events_of_one_loop_tick_are_one_commit():
    engine, observer = CountingEngine(), Recorder()
    async with driving(engine, observer) as driver:
        ranks = [Rank(driver, number, world_size=50).hello().arrive() for number in range(50)]
        assert engine.commits == [], "nothing is done before the loop comes round"
        await settle()
        assert all(rank.heard == [Welcome, GroupJoined, Decision] for rank in ranks)
        (commit,) = engine.commits
        assert commit.kinds == ["decision", "group", "run"] + ["speaker"] * 50
        assert observer.commits == 1


async def test_events_of_different_ticks_are_different_commits():
    engine = CountingEngine()
    async with driving(engine) as driver:
        rank = Rank(driver, 0, world_size=1).hello()
        for sequence in range(3):
            rank.arrive(sequence)
            await settle()
        assert [commit.kinds for commit in engine.commits] == [
            ["decision", "group", "run", "speaker"],
            ["decision"],
            ["decision"],
        ]


async def test_the_age_of_a_commit_is_known_while_it_is_under_way():
    class Hand:
        moment = 1_000.0

        def now(self) -> Instant:
            return Instant(self.moment, WALL)

    engine, clock = HeldEngine(), Hand()
    async with driving(engine, clock=clock) as driver:
        assert driver.commit_age() == 0
        Rank(driver, 0, world_size=1).hello()
        commit = await engine.begun.get()
        clock.moment += 40
        assert driver.commit_age() == 40
        commit.end()
        await runs(driver)
        assert driver.commit_age() == 0


async def test_a_batch_without_records_needs_no_commit():
    engine = CountingEngine()
    async with driving(engine) as driver:
        rank = Rank(driver, 0).arrive()
        assert await runs(driver) == []
        assert len(rank.told) == 1
        assert engine.commits == []


# ---------------------------------------------------------------------- 3: durable before told


async def test_no_round_is_told_before_the_commit_returns():
    engine, observer = HeldEngine(), Recorder()
    async with driving(engine, observer) as driver:
        node = join(driver)
        commit = await engine.begun.get()
        assert commit.kinds == ["participant", "round", "run"]
        await settle()
        assert (node.told, observer.rounds, observer.notices) == ([], [], [])
        commit.end()
        assert await node.hears(RoundComplete) == RoundComplete(0, 0, 1)
        assert node.heard == [Standing, RoundComplete]
        await settle()
        assert [(one.run_id, one.round, one.world_size) for one in observer.rounds] == [("job", 0, 1)]
        assert [one.event for one in observer.notices] == ["round.completed"]


async def test_nothing_is_told_before_the_commit_returns():
    engine, observer = HeldEngine(), Recorder()
    async with driving(engine, observer) as driver:
        changed = driver.watch()
        ranks = [Rank(driver, number).hello().arrive() for number in range(2)]
        commit = await engine.begun.get()
        assert commit.kinds == ["decision", "group", "run", "speaker", "speaker"]
        await settle()
        assert [rank.told for rank in ranks] == [[], []]
        assert observer.decisions == []
        assert observer.commits == 0
        assert not changed.is_set()
        commit.end()
        for rank in ranks:
            decision = await rank.hears(Decision)
            assert decision.outcome is Outcome.RELEASED
        assert observer.decisions == [decision]
        assert observer.commits == 1
        assert changed.is_set()


async def test_a_querys_answer_waits_until_what_it_shows_is_durable():
    engine = HeldEngine()
    async with driving(engine) as driver:
        Rank(driver, 0).hello()
        answer = asyncio.create_task(runs(driver))
        commit = await engine.begun.get()
        await settle()
        assert not answer.done()
        commit.end()
        assert await answer == ["job"]


async def test_a_query_asked_during_a_commit_waits_for_it_and_sees_what_came_before():
    engine = HeldEngine()
    async with driving(engine) as driver:
        Rank(driver, 0).hello()
        commit = await engine.begun.get()
        answer = asyncio.create_task(runs(driver))
        await settle()
        assert not answer.done()
        commit.end()
        assert await answer == ["job"]


async def test_a_query_looks_in_its_place_among_the_events():
    async with driving(MemoryEngine()) as driver:
        before = asyncio.create_task(runs(driver))
        await asyncio.sleep(0)
        Rank(driver, 0).hello()
        assert await runs(driver) == ["job"]
        assert await before == []


async def test_a_querys_refusal_is_raised():
    async with driving(MemoryEngine()) as driver:
        with pytest.raises(Refusal) as caught:
            await driver.query(lambda core, _: core.run("nope"))
        assert caught.value.reason is Reason.RUN_NOT_FOUND


async def test_a_fault_in_a_query_stops_the_driver():
    def broken(core: Coordinator, _: object) -> None:
        raise KeyError("bug")

    async with driving(MemoryEngine()) as driver:
        asked = asyncio.create_task(driver.query(broken))
        await settle()
        assert isinstance(driver.failed.exception(), KeyError)
        asked.cancel()


@pytest.mark.parametrize("broken", ["serve", "step", "next_deadline"])
async def test_fault_in_the_core_stops_the_driver(broken: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Coordinator, broken, _fault)
    async with driving(MemoryEngine()) as driver:
        Rank(driver, 0).hello()
        await settle()
        with pytest.raises(RuntimeError, match="half a step"):
            driver.failed.result()


@in_virtual_time
async def test_fault_while_a_tick_is_put_off_stops_the_driver():
    async with driving(MemoryEngine(), clock=LoopClock()) as driver:
        Rank(driver, 0).hello().arrive(timeout=20.0)
        await settle()
        stand_still(60.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Coordinator, "next_deadline", _fault)
            await settle()
        with pytest.raises(RuntimeError, match="half a step"):
            await driver.failed


async def test_half_of_a_step_is_not_committed_when_the_step_raises_during_a_commit(
    monkeypatch: pytest.MonkeyPatch,
):
    engine, observer = HeldEngine(), Recorder()
    async with driving(engine, observer) as driver:
        ranks = [Rank(driver, number).hello() for number in range(2)]
        commit = await engine.begun.get()
        monkeypatch.setattr(Group, "_released", _fault)
        for rank in ranks:
            rank.arrive()
        await settle()
        with pytest.raises(RuntimeError, match="half a step"):
            driver.failed.result()
        commit.end()
        for rank in ranks:
            await rank.hears(GroupJoined)
        await settle()
        assert engine.begun.empty(), "the decision of a step that raised is committed"
        assert [rank.heard for rank in ranks] == [[Welcome, GroupJoined]] * 2
        assert observer.decisions == []


def _fault(*_: object) -> None:
    raise RuntimeError("half a step")


async def test_an_asker_that_has_gone_disturbs_nobody():
    engine = HeldEngine()
    async with driving(engine) as driver:
        rank = Rank(driver, 0).hello()
        gone, refused = (
            asyncio.create_task(runs(driver)),
            asyncio.create_task(
                driver.query(lambda core, now: barrier_views.barrier(core, "job", "nope", None, now))
            ),
        )
        commit = await engine.begun.get()
        gone.cancel()
        refused.cancel()
        await settle()
        commit.end()
        await rank.hears(GroupJoined)
        assert await runs(driver) == ["job"]
        assert not driver.failed.done()


async def test_a_session_that_has_disconnected_is_told_nothing():
    engine = HeldEngine()
    async with driving(engine) as driver:
        gone, there = (Rank(driver, number).hello().arrive() for number in range(2))
        commit = await engine.begun.get()
        driver.disconnect(gone.id)
        driver.submit(Disconnected(gone.id))
        commit.end()
        await there.hears(Decision)
        assert gone.told == []


async def test_a_watcher_is_told_until_it_stops_watching():
    async with driving(MemoryEngine()) as driver:
        watching, stopped = driver.watch(), driver.watch()
        driver.unwatch(stopped)
        Rank(driver, 0).hello()
        await asyncio.wait_for(watching.wait(), PATIENCE)
        assert not stopped.is_set()


async def test_query_wakes_no_watcher():
    """Else one that looks wakes all others, and they wake it."""
    async with driving(MemoryEngine()) as driver:
        watching = driver.watch()
        await driver.query(lambda core, _: len(core.runs))
        assert not watching.is_set()


async def test_a_decision_is_encoded_once_for_all_who_wait():
    encoded: list[Message] = []

    def encode(message: Message) -> bytes:
        encoded.append(message)
        return encode_session_message(message)

    async with driving(MemoryEngine(), encode=encode) as driver:
        ranks = [Rank(driver, number, world_size=100).hello().arrive() for number in range(100)]
        await settle()
        (decision,) = (message for message in encoded if isinstance(message, Decision))
        assert all(rank.told[-1] is decision for rank in ranks)
        assert all(rank.data[-1] is ranks[0].data[-1] for rank in ranks)


async def test_what_nobody_hears_is_not_encoded():
    def encode(message: Message) -> bytes:
        raise AssertionError("nobody asked for it")

    async with driving(MemoryEngine(), encode=encode) as driver:
        driver.disconnect(Rank(driver, 0, world_size=1).hello().arrive().id)
        assert await runs(driver) == ["job"]


# ---------------------------------------------------------------------- 4: the next batch gathers


async def test_the_next_batch_gathers_during_a_commit_and_is_committed_after_it():
    engine, observer = HeldEngine(), Recorder()
    async with driving(engine, observer) as driver:
        rank = Rank(driver, 0, world_size=1).hello().arrive(0)
        first = await engine.begun.get()
        for sequence in (1, 2, 3):
            rank.arrive(sequence)
            await settle()
        assert engine.begun.empty(), "one commit at a time"
        first.end()
        second = await engine.begun.get()
        assert second.kinds == ["decision"] * 3, "group commit: what gathered goes together"
        await settle()
        assert rank.heard == [Welcome, GroupJoined, Decision], "the first batch, and no more"
        second.end()
        await runs(driver)
        assert [of_kind(Decision, message).sequence for message in rank.told[2:]] == [0, 1, 2, 3]
        assert observer.commits == 2


async def test_a_message_without_a_record_does_not_overtake_one_that_waits():
    engine = HeldEngine()
    async with driving(engine) as driver:
        rank = Rank(driver, 0, world_size=1).hello().arrive(0)
        commit = await engine.begun.get()
        rank.arrive(99)
        await settle()
        assert rank.told == []
        commit.end()
        await rank.hears(Decision)
        await settle()
        assert [type(message).__name__ for message in rank.told[2:]] == ["Decision", "Refused"]


# ---------------------------------------------------------------------- 5: a failing commit


async def test_when_a_commit_fails_nothing_is_told_and_the_driver_stops():
    engine, observer = HeldEngine(), Recorder()
    async with driving(engine, observer) as driver:
        ranks = [Rank(driver, number).hello().arrive() for number in range(2)]
        commit = await engine.begun.get()
        gathered = asyncio.create_task(runs(driver))
        await settle()
        commit.end(StorageError("the disk is full"))
        with pytest.raises(StorageError, match="the disk is full"):
            await driver.failed
        later = asyncio.create_task(runs(driver))
        ranks[0].arrive(1)
        await settle()
        assert [rank.told for rank in ranks] == [[], []]
        assert (observer.decisions, observer.notices, observer.commits) == ([], [], 0)
        assert engine.begun.empty()
        assert not gathered.done()
        assert not later.done()
        gathered.cancel()
        later.cancel()


class LeaderEngine(HeldEngine):
    """An engine for several replicas, of which another may lead when the test says so."""

    leads = True

    def check_lead(self) -> None:
        if not self.leads:
            raise LeadLostError("another replica may lead")


async def test_who_may_not_lead_any_more_tells_nothing_not_even_what_is_durable():
    engine, observer = LeaderEngine(), Recorder()
    async with driving(engine, observer) as driver:
        rank = Rank(driver, 0, world_size=1).hello().arrive()
        commit = await engine.begun.get()
        engine.leads = False
        commit.end()
        with pytest.raises(LeadLostError):
            await driver.failed
        assert rank.told == []
        assert observer.decisions == []


async def test_who_may_not_lead_any_more_answers_nothing_that_needs_no_commit():
    engine = LeaderEngine()
    engine.leads = False
    async with driving(engine) as driver:
        asked = asyncio.create_task(runs(driver))
        with pytest.raises(LeadLostError):
            await driver.failed
        await settle()
        assert not asked.done()
        asked.cancel()


async def test_who_may_not_lead_any_more_asks_nobody_what_they_do():
    engine = LeaderEngine()
    async with driving(engine) as driver:
        rank = Rank(driver, 0)
        driver.tell(rank.id, Inspect(1))
        assert rank.told == [Inspect(1)]
        engine.leads = False
        driver.tell(rank.id, Inspect(2))
        with pytest.raises(LeadLostError):
            await driver.failed
        driver.tell(rank.id, Inspect(3))
        assert rank.told == [Inspect(1)]


async def test_an_engine_that_does_not_block_fails_alike():
    engine = CountingEngine(fail_at=2)
    async with driving(engine) as driver:
        rank = Rank(driver, 0, world_size=1).hello()
        await rank.hears(GroupJoined)
        rank.arrive(0).arrive(1)
        with pytest.raises(StorageError):
            await driver.failed
        rank.arrive(2)
        await settle()
        assert rank.heard == [Welcome, GroupJoined]
        assert len(engine.commits) == 2


async def test_what_was_not_committed_has_not_happened_after_a_restart():
    engine = CountingEngine(fail_at=2)
    async with driving(engine) as driver:
        zero, one = (Rank(driver, number).hello() for number in range(2))
        await one.hears(GroupJoined)
        zero.arrive(failure="out of memory")
        with pytest.raises(StorageError):
            await driver.failed
    async with driving(engine) as driver:
        zero, one = (Rank(driver, number).hello().arrive() for number in range(2))
        decision = await one.hears(Decision)
        assert (decision.sequence, decision.outcome) == (0, Outcome.RELEASED)


async def test_a_fault_while_delivering_stops_the_driver():
    def encode(message: Message) -> bytes:
        raise ZeroDivisionError

    for engine in (MemoryEngine(), HeldEngine()):
        async with driving(engine, encode=encode) as driver:
            Rank(driver, 0).hello()
            if isinstance(engine, HeldEngine):
                (await engine.begun.get()).end()
            with pytest.raises(ZeroDivisionError):
                await driver.failed


async def test_a_state_that_cannot_be_read_is_an_error_at_the_start():
    engine = MemoryEngine()
    engine.commit({b"lease\0job": b""})
    with pytest.raises(StorageError, match="no record is called b'lease'"):
        async with driving(engine):
            raise AssertionError("it started")


# ---------------------------------------------------------------------- after a restart


@pytest.mark.parametrize(
    ("failure", "outcome"), [(None, Outcome.RELEASED), ("the disk is full", Outcome.ABORTED)]
)
async def test_a_rank_that_had_not_heard_gets_the_same_decision_after_a_restart(failure, outcome):
    """The commit returned, and the coordinator died before it told rank 1 (and rank 0, for all it knows)."""
    engine = MemoryEngine()
    async with driving(engine) as driver:
        zero, one = (Rank(driver, number).hello() for number in range(2))
        await one.hears(GroupJoined)
        driver.disconnect(one.id)
        one.arrive()
        zero.arrive(failure=failure)
        first = await zero.hears(Decision)
        assert first.outcome is outcome
        assert Decision not in one.heard
        ordinals = [of_kind(Welcome, rank.told[0]).ordinals[0] for rank in (zero, one)]
    async with driving(engine) as driver:
        assert driver.coordinator.epoch == 2
        back = [Rank(driver, number, ordinal=ordinals[number]).hello().arrive() for number in (1, 0)]
        for rank in back:
            await rank.hears(Decision)
            assert rank.told[1] == GroupJoined(CKPT, ((rank.rank, 0),))
            assert rank.data[-1] == zero.data[-1], "to the last byte"
        for rank in back:
            rank.told.clear()
            rank.arrive(1)
        assert (await back[0].hears(Decision)).sequence == 1


# ---------------------------------------------------------------------- time


@in_virtual_time
async def test_a_barrier_is_decided_at_its_deadline_and_told_of_at_half():
    async with driving(MemoryEngine(), clock=LoopClock()) as driver:
        rank, missing = Rank(driver, 0).hello().arrive(timeout=300.0), Rank(driver, 1).hello()
        looks: list[tuple[float, ProbeRequest]] = []
        driver.look = lambda look: looks.append((asyncio.get_running_loop().time(), look))
        progress = await rank.hears(Progress)
        assert asyncio.get_running_loop().time() == START + 150
        assert progress.arrived == 1
        decision = await rank.hears(Decision)
        assert asyncio.get_running_loop().time() == START + 300
        assert (decision.outcome, decision.wait) == (Outcome.TIMED_OUT, 300.0)
        assert [at for at, _ in looks] == [START + 148, START + 298], "the missing are asked just before"
        assert [one.session for _, look in looks for one in look.processes] == [missing.id] * 2


@in_virtual_time
async def test_an_earlier_deadline_moves_the_timer_forward():
    async with driving(MemoryEngine(), clock=LoopClock()) as driver:
        zero, one = (Rank(driver, number).hello() for number in range(2))
        zero.arrive(timeout=300.0)
        await settle()
        driver.disconnect(one.id)
        driver.submit(Disconnected(one.id))
        decision = await zero.hears(Decision)
        assert asyncio.get_running_loop().time() == START + TTL
        assert decision.outcome is Outcome.MEMBER_LOST


@in_virtual_time
async def test_a_deadline_that_has_become_void_disturbs_nobody():
    async with driving(MemoryEngine(), clock=LoopClock()) as driver:
        zero, one = (Rank(driver, number).hello().arrive(timeout=20.0) for number in range(2))
        await one.hears(Decision)
        zero.told.clear()
        zero.arrive(1, timeout=300.0)
        assert (await zero.hears(Decision)).outcome is Outcome.TIMED_OUT
        assert asyncio.get_running_loop().time() == START + 300
        assert zero.heard == [Progress, Decision]


@in_virtual_time
async def test_those_who_do_not_come_back_after_a_restart_are_given_up_after_the_ttl():
    engine = MemoryEngine()
    async with driving(engine, clock=LoopClock()) as driver:
        zero, one = (Rank(driver, number).hello() for number in range(2))
        await one.hears(GroupJoined)
    async with driving(engine, clock=LoopClock()) as driver:
        zero = Rank(driver, 0, ordinal=of_kind(Welcome, zero.told[0]).ordinals[0]).hello().arrive()
        decision = await zero.hears(Decision)
        assert asyncio.get_running_loop().time() == START + TTL
        assert decision.outcome is Outcome.MEMBER_LOST
        assert [one.rank for one in decision.missing] == [1]


@in_virtual_time
async def test_restored_members_have_the_ttl_from_when_the_coordinator_serves():
    """Reading a large state takes longer than the TTL, and so does binding the ports behind it."""
    engine, loop = MemoryEngine(), asyncio.get_running_loop()
    async with driving(engine, clock=LoopClock()) as driver:
        zero, one = (Rank(driver, number).hello() for number in range(2))
        node = join(driver)
        await one.hears(GroupJoined)
        complete = await node.hears(RoundComplete)
    async with driving(engine, clock=LoopClock()) as driver:
        await asyncio.sleep(2 * TTL)
        driver.serve()
        await asyncio.sleep(TTL - 1.0)
        zero = Rank(driver, 0, ordinal=of_kind(Welcome, zero.told[0]).ordinals[0]).hello().arrive()
        again = join(driver, complete.round)
        await again.hears(RoundComplete)
        decision = await zero.hears(Decision)
        assert loop.time() == START + 3 * TTL
        assert [one.rank for one in decision.missing] == [1]


def stand_still(seconds: float) -> None:
    """This process is stopped, as by SIGSTOP, while the clock goes on."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.now += seconds


@in_virtual_time
async def test_barrier_waits_for_queued_arrivals_when_the_coordinator_was_paused():
    async with driving(MemoryEngine(), clock=LoopClock()) as driver:
        zero, one = (Rank(driver, number).hello() for number in range(2))
        zero.arrive(timeout=20.0)
        await settle()
        stand_still(60.0)
        await asyncio.sleep(0.5)
        one.arrive()
        assert (await zero.hears(Decision)).outcome is Outcome.RELEASED


@in_virtual_time
async def test_member_that_comes_back_is_not_given_up_when_the_coordinator_was_paused():
    async with driving(MemoryEngine(), clock=LoopClock()) as driver:
        zero, one = (Rank(driver, number).hello() for number in range(2))
        zero.arrive()
        await one.hears(GroupJoined)
        driver.disconnect(one.id)
        driver.submit(Disconnected(one.id))
        await asyncio.sleep(TTL / 2)
        stand_still(TTL)
        await asyncio.sleep(0.5)
        Rank(driver, 1, ordinal=of_kind(Welcome, one.told[0]).ordinals[0]).hello().arrive()
        assert (await zero.hears(Decision)).outcome is Outcome.RELEASED


@in_virtual_time
async def test_barrier_times_out_a_moment_after_the_coordinator_was_paused():
    async with driving(MemoryEngine(), clock=LoopClock()) as driver:
        zero = Rank(driver, 0).hello().arrive(timeout=20.0)
        await settle()
        stand_still(60.0)
        assert (await zero.hears(Decision)).outcome is Outcome.TIMED_OUT
        assert asyncio.get_running_loop().time() == START + 60.0 + RECONNECT_GRACE


@in_virtual_time
async def test_barrier_times_out_when_the_coordinator_is_always_late():
    async with driving(MemoryEngine(), clock=LoopClock()) as driver:
        zero = Rank(driver, 0).hello().arrive(timeout=20.0)
        await settle()
        while Decision not in zero.heard:
            stand_still(60.0)
            await settle()
        assert asyncio.get_running_loop().time() == START + 60.0 * (MAX_PUT_OFF + 1)


@in_virtual_time
async def test_first_event_begins_the_time_of_restored_members():
    engine = MemoryEngine()
    async with driving(engine, clock=LoopClock()) as driver:
        zero = Rank(driver, 0).hello()
        await zero.hears(GroupJoined)
    async with driving(engine, clock=LoopClock()) as driver:
        await asyncio.sleep(2 * TTL)
        one = Rank(driver, 1).hello().arrive()
        await one.hears(Decision)
        assert asyncio.get_running_loop().time() == START + 3 * TTL


# ---------------------------------------------------------------------- the end


async def test_close_waits_for_the_commit_in_flight_and_lets_go_of_the_storage():
    engine = HeldEngine()
    async with driving(engine) as driver:
        rank = Rank(driver, 0).hello()
        commit = await engine.begun.get()
        closing = asyncio.create_task(driver.close())
        await settle()
        assert not closing.done()
        assert engine.closed == 0
        commit.end()
        await closing
        assert engine.closed == 1
        assert rank.heard == [Welcome, GroupJoined]
        assert driver.failed.cancelled()


@in_virtual_time
async def test_no_timer_outlives_the_driver():
    async with driving(MemoryEngine(), clock=LoopClock()) as driver:
        rank = Rank(driver, 0).hello().arrive(timeout=5.0)
        await rank.hears(GroupJoined)
    await asyncio.sleep(60)
    assert Decision not in rank.heard


async def test_sessions_have_different_ids():
    async with driving(MemoryEngine()) as driver:
        first = Rank(driver, 0).id
        driver.disconnect(first)
        driver.disconnect(first)
        assert Rank(driver, 0).id != first


@in_virtual_time
async def test_a_retired_driver_takes_nobody_for_dead():
    """It stops soon, and has asked everyone to connect to its successor."""
    async with driving(MemoryEngine(), clock=LoopClock()) as driver:
        lost, waiting = Rank(driver, 0).hello(), Rank(driver, 1).hello()
        await waiting.arrive(timeout=50.0).hears(GroupJoined)
        watcher = driver.watch()
        await settle()
        driver.submit(Disconnected(lost.id))
        await settle()
        watcher.clear()
        driver.retire()
        assert watcher.is_set()
        await asyncio.sleep(100)
        assert Decision not in waiting.heard


async def test_a_driver_that_retires_finishes_what_it_has_taken_in_and_no_more():
    engine = HeldEngine()
    async with driving(engine) as driver:
        rank = Rank(driver, 0, world_size=1).hello()
        (await engine.begun.get()).end()
        await rank.hears(GroupJoined)
        rank.arrive()
        deciding = await engine.begun.get()
        asked = asyncio.ensure_future(runs(driver))
        await settle()
        driver.retire()
        retiring = asyncio.ensure_future(driver.settled())
        await settle()
        rank.arrive()
        with pytest.raises(Refusal) as caught:
            await runs(driver)
        assert caught.value.reason is Reason.COORDINATOR_DRAINING
        with pytest.raises(Refusal):
            Rank(driver, 1)
        assert not retiring.done(), "a commit is under way"
        deciding.end()
        await asyncio.wait_for(retiring, PATIENCE)
        await rank.hears(Decision)
        assert await asked == ["job"]
        assert engine.begun.empty(), "what came too late is not taken in"


async def test_a_driver_that_has_failed_retires_at_once():
    engine = HeldEngine()
    async with driving(engine) as driver:
        Rank(driver, 0, world_size=1).hello()
        (await engine.begun.get()).end(StorageError("the disk is full"))
        driver.retire()
        await asyncio.wait_for(driver.settled(), PATIENCE)
        assert isinstance(driver.failed.exception(), StorageError)


async def test_a_state_that_lacks_a_row_is_an_error_at_the_start():
    engine = MemoryEngine()
    engine.commit(codec.encode_all([GroupRecord("job", "checkpoint", 0, 0)]).writes)
    with pytest.raises(StorageError, match="not whole: rows speak of 'job'"):
        async with driving(engine):
            raise AssertionError("it started")


# ---------------------------------------------------------------------- runs that are forgotten


async def test_nobody_sees_that_a_run_is_forgotten_before_that_is_on_disk():
    engine, observer = HeldEngine(), Recorder()
    async with driving(engine, observer, retention=Retention(closed=1.0, idle=0.05)) as driver:
        rank = Rank(driver, 0, world_size=1).hello()
        (await engine.begun.get()).end()
        await rank.hears(GroupJoined)
        driver.submit(Goodbye(rank.id))
        (await engine.begun.get()).end()
        forgetting = await engine.begun.get()
        asking = asyncio.ensure_future(runs(driver))
        await settle()
        assert forgetting.writes == {b"run\0job": None}
        assert b"speaker\0job\0" in forgetting.cleared
        assert (observer.forgotten_runs, asking.done()) == ([], False)
        forgetting.end()
        assert await asking == []
        assert observer.forgotten_runs == ["job"]
        assert list(engine.scan()) == []
