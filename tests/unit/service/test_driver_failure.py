"""What a driver does when a commit, the core or the lead fails, and what is left after a restart."""

import asyncio

import pytest

from muster.service.core.barriers.group import Group
from muster.service.core.coordinator import Coordinator
from muster.service.core.vocabulary.effects import GroupJoined, Inspect, Welcome
from muster.service.core.vocabulary.model import Decision, Outcome
from muster.service.core.vocabulary.records import GroupRecord
from muster.service.storage import codec
from muster.service.storage.engine import LeadLostError, StorageError
from muster.service.storage.memory import MemoryEngine
from tests.support.expect import of_kind, raising
from tests.support.world.driver_world import (
    CKPT,
    CountingEngine,
    Rank,
    Recorder,
    driving,
    fault,
    runs,
    settle,
)
from tests.support.world.held_engine import HeldEngine


async def test_fault_in_a_query_stops_the_driver():
    async with driving(MemoryEngine()) as driver:
        asked = asyncio.create_task(driver.query(raising(KeyError, "bug")))
        await settle()
        assert isinstance(driver.failed.exception(), KeyError)
        asked.cancel()


@pytest.mark.parametrize("broken", ["serve", "step", "next_deadline"])
async def test_fault_in_the_core_stops_the_driver(broken: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Coordinator, broken, fault)
    async with driving(MemoryEngine()) as driver:
        Rank(driver, 0).hello()
        await settle()
        with pytest.raises(RuntimeError, match="half a step"):
            driver.failed.result()


async def test_step_that_raises_during_a_commit_is_not_committed(
    monkeypatch: pytest.MonkeyPatch,
):
    engine, observer = HeldEngine(), Recorder()
    async with driving(engine, observer) as driver:
        ranks = [Rank(driver, number).hello() for number in range(2)]
        commit = await engine.begun.get()
        monkeypatch.setattr(Group, "_released", fault)
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


async def test_failing_commit_delivers_nothing_and_stops_the_driver():
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
        assert [rank.messages for rank in ranks] == [[], []]
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


async def test_driver_without_a_certain_lease_delivers_nothing_even_if_durable():
    engine, observer = LeaderEngine(), Recorder()
    async with driving(engine, observer) as driver:
        rank = Rank(driver, 0, world_size=1).hello().arrive()
        commit = await engine.begun.get()
        engine.leads = False
        commit.end()
        with pytest.raises(LeadLostError):
            await driver.failed
        assert rank.messages == []
        assert observer.decisions == []


async def test_driver_without_a_certain_lease_answers_no_query():
    engine = LeaderEngine()
    engine.leads = False
    async with driving(engine) as driver:
        asked = asyncio.create_task(runs(driver))
        with pytest.raises(LeadLostError):
            await driver.failed
        await settle()
        assert not asked.done()
        asked.cancel()


async def test_driver_without_a_certain_lease_asks_no_process():
    engine = LeaderEngine()
    async with driving(engine) as driver:
        rank = Rank(driver, 0)
        driver.tell(rank.id, Inspect(1))
        assert rank.messages == [Inspect(1)]
        engine.leads = False
        driver.tell(rank.id, Inspect(2))
        with pytest.raises(LeadLostError):
            await driver.failed
        driver.tell(rank.id, Inspect(3))
        assert rank.messages == [Inspect(1)]


async def test_engine_that_does_not_block_fails_alike():
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


async def test_uncommitted_events_have_no_effect_after_a_restart():
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


async def test_fault_while_delivering_stops_the_driver():
    for engine in (MemoryEngine(), HeldEngine()):
        async with driving(engine, encode=raising(ZeroDivisionError)) as driver:
            Rank(driver, 0).hello()
            if isinstance(engine, HeldEngine):
                (await engine.begun.get()).end()
            with pytest.raises(ZeroDivisionError):
                await driver.failed


async def test_unreadable_state_is_an_error_at_the_start():
    engine = MemoryEngine()
    engine.commit({b"lease\0job": b""})
    with pytest.raises(StorageError, match="no record is called b'lease'"):
        async with driving(engine):
            raise AssertionError("it started")


@pytest.mark.parametrize(
    ("failure", "outcome"), [(None, Outcome.RELEASED), ("the disk is full", Outcome.ABORTED)]
)
async def test_rank_gets_the_same_decision_after_a_restart(failure, outcome):
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
        ordinals = [of_kind(Welcome, rank.messages[0]).ordinals[0] for rank in (zero, one)]
    async with driving(engine) as driver:
        assert driver.coordinator.epoch == 2
        back = [Rank(driver, number, ordinal=ordinals[number]).hello().arrive() for number in (1, 0)]
        for rank in back:
            await rank.hears(Decision)
            assert rank.messages[1] == GroupJoined(CKPT, ((rank.rank, 0),))
            assert rank.data[-1] == zero.data[-1], "to the last byte"
        for rank in back:
            rank.messages.clear()
            rank.arrive(1)
        assert (await back[0].hears(Decision)).sequence == 1


async def test_state_without_a_required_row_is_an_error_at_the_start():
    engine = MemoryEngine()
    engine.commit(codec.encode_all([GroupRecord("job", "checkpoint", 0, 0)]).writes)
    with pytest.raises(StorageError, match="not whole: rows speak of 'job'"):
        async with driving(engine):
            raise AssertionError("it started")
