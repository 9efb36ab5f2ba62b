"""The driver commits in batches and delivers only what is durable: invariant 2 (durable before delivered)."""

import asyncio

import pytest

from lab.patience import PATIENCE
from muster.service.core import barrier_views
from muster.service.core.retention.retention import Retention
from muster.service.core.vocabulary.effects import GroupJoined, Message, RoundComplete, Standing, Welcome
from muster.service.core.vocabulary.events import (
    Disconnected,
    Goodbye,
)
from muster.service.core.vocabulary.model import Decision, Instant, Outcome
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.rpc.codec import encode_session_message
from muster.service.storage.engine import StorageError
from muster.service.storage.memory import MemoryEngine
from tests.support.expect import of_kind, raising
from tests.support.world.driver_world import (
    CountingEngine,
    Rank,
    Recorder,
    driving,
    join,
    runs,
    settle,
)
from tests.support.world.held_engine import HeldEngine
from tests.support.world.virtual_time import WALL

# ---------------------------------------------------------------------- 1 and 2: batches


async def test_events_are_taken_in_order():
    async with driving(CountingEngine()) as driver:
        rank = Rank(driver, 0, world_size=1)
        rank.arrive(0).hello().arrive(0).arrive(1)
        await settle()
        assert [type(message).__name__ for message in rank.messages] == [
            "Refused",
            "Welcome",
            "GroupJoined",
            "Decision",
            "Decision",
        ]
        assert [m.sequence for m in rank.messages if isinstance(m, Decision)] == [0, 1]


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


async def test_age_of_a_commit_is_known_while_it_is_under_way():
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


async def test_batch_without_records_needs_no_commit():
    engine = CountingEngine()
    async with driving(engine) as driver:
        rank = Rank(driver, 0).arrive()
        assert await runs(driver) == []
        assert len(rank.messages) == 1
        assert engine.commits == []


# ---------------------------------------------------------------------- 3: durable before told


async def test_round_is_not_delivered_before_its_commit():
    engine, observer = HeldEngine(), Recorder()
    async with driving(engine, observer) as driver:
        node = join(driver)
        commit = await engine.begun.get()
        assert commit.kinds == ["agreement", "participant", "round", "run"]
        await settle()
        assert (node.messages, observer.rounds, observer.notices) == ([], [], [])
        commit.end()
        assert await node.hears(RoundComplete) == RoundComplete(0, 0, 1)
        assert node.heard == [Standing, RoundComplete]
        await settle()
        assert [(one.run_id, one.round, one.world_size) for one in observer.rounds] == [("job", 0, 1)]
        assert [one.event for one in observer.notices] == ["round.completed"]


async def test_nothing_is_delivered_before_its_commit():
    engine, observer = HeldEngine(), Recorder()
    async with driving(engine, observer) as driver:
        changed = driver.watch()
        ranks = [Rank(driver, number).hello().arrive() for number in range(2)]
        commit = await engine.begun.get()
        assert commit.kinds == ["decision", "group", "run", "speaker", "speaker"]
        await settle()
        assert [rank.messages for rank in ranks] == [[], []]
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


async def test_answer_to_a_query_waits_until_its_state_is_durable():
    engine = HeldEngine()
    async with driving(engine) as driver:
        Rank(driver, 0).hello()
        answer = asyncio.create_task(runs(driver))
        commit = await engine.begun.get()
        await settle()
        assert not answer.done()
        commit.end()
        assert await answer == ["job"]


async def test_query_during_a_commit_waits_for_it_and_sees_earlier_events():
    engine = HeldEngine()
    async with driving(engine) as driver:
        Rank(driver, 0).hello()
        commit = await engine.begun.get()
        answer = asyncio.create_task(runs(driver))
        await settle()
        assert not answer.done()
        commit.end()
        assert await answer == ["job"]


async def test_query_sees_exactly_the_events_before_it():
    async with driving(MemoryEngine()) as driver:
        before = asyncio.create_task(runs(driver))
        await asyncio.sleep(0)
        Rank(driver, 0).hello()
        assert await runs(driver) == ["job"]
        assert await before == []


async def test_querys_refusal_is_raised():
    async with driving(MemoryEngine()) as driver:
        with pytest.raises(Refusal) as caught:
            await driver.query(lambda core, _: core.run("nope"))
        assert caught.value.reason is Reason.RUN_NOT_FOUND


async def test_abandoned_query_does_not_stop_the_driver():
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


async def test_disconnected_session_gets_no_messages():
    engine = HeldEngine()
    async with driving(engine) as driver:
        gone, there = (Rank(driver, number).hello().arrive() for number in range(2))
        commit = await engine.begun.get()
        driver.disconnect(gone.id)
        driver.submit(Disconnected(gone.id))
        commit.end()
        await there.hears(Decision)
        assert gone.messages == []


async def test_watcher_is_woken_until_it_stops_watching():
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


async def test_decision_is_encoded_once_for_all_receivers():
    encoded: list[Message] = []

    def encode(message: Message) -> bytes:
        encoded.append(message)
        return encode_session_message(message)

    async with driving(MemoryEngine(), encode=encode) as driver:
        ranks = [Rank(driver, number, world_size=100).hello().arrive() for number in range(100)]
        await settle()
        (decision,) = (message for message in encoded if isinstance(message, Decision))
        assert all(rank.messages[-1] is decision for rank in ranks)
        assert all(rank.data[-1] is ranks[0].data[-1] for rank in ranks)


async def test_message_without_receivers_is_not_encoded():
    async with driving(MemoryEngine(), encode=raising(AssertionError, "nobody asked for it")) as driver:
        driver.disconnect(Rank(driver, 0, world_size=1).hello().arrive().id)
        assert await runs(driver) == ["job"]


# ---------------------------------------------------------------------- 4: the next batch gathers


async def test_next_batch_gathers_during_a_commit_and_is_committed_after_it():
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
        assert [of_kind(Decision, message).sequence for message in rank.messages[2:]] == [0, 1, 2, 3]
        assert observer.commits == 2


async def test_message_without_a_record_does_not_overtake_a_waiting_one():
    engine = HeldEngine()
    async with driving(engine) as driver:
        rank = Rank(driver, 0, world_size=1).hello().arrive(0)
        commit = await engine.begun.get()
        rank.arrive(99)
        await settle()
        assert rank.messages == []
        commit.end()
        await rank.hears(Decision)
        await settle()
        assert [type(message).__name__ for message in rank.messages[2:]] == ["Decision", "Refused"]


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


async def test_sessions_have_different_ids():
    async with driving(MemoryEngine()) as driver:
        first = Rank(driver, 0).id
        driver.disconnect(first)
        driver.disconnect(first)
        assert Rank(driver, 0).id != first


async def test_retired_driver_finishes_accepted_events_and_no_others():
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
        retiring = asyncio.ensure_future(driver.wait_drained())
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


async def test_failed_driver_retires_at_once():
    engine = HeldEngine()
    async with driving(engine) as driver:
        Rank(driver, 0, world_size=1).hello()
        (await engine.begun.get()).end(StorageError("the disk is full"))
        driver.retire()
        await asyncio.wait_for(driver.wait_drained(), PATIENCE)
        assert isinstance(driver.failed.exception(), StorageError)


# ---------------------------------------------------------------------- runs that are forgotten


async def test_forgotten_run_is_visible_until_that_is_durable():
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
