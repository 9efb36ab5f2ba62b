"""The driver's timer, in virtual time."""

import asyncio

import pytest

from muster.service.core.coordinator import Coordinator
from muster.service.core.elapsed import RECONNECT_GRACE
from muster.service.core.vocabulary.effects import GroupJoined, ProbeRequest, Progress, RoundComplete, Welcome
from muster.service.core.vocabulary.events import (
    Disconnected,
)
from muster.service.core.vocabulary.model import Decision, Outcome
from muster.service.driver import MAX_PUT_OFF
from muster.service.storage.memory import MemoryEngine
from tests.support.expect import of_kind
from tests.support.world.driver_world import (
    TTL,
    Rank,
    driving,
    fault,
    join,
    settle,
)
from tests.support.world.virtual_time import START, LoopClock, VirtualTimeLoop, in_virtual_time


@in_virtual_time
async def test_fault_while_a_tick_is_put_off_stops_the_driver():
    async with driving(MemoryEngine(), clock=LoopClock()) as driver:
        Rank(driver, 0).hello().arrive(timeout=20.0)
        await settle()
        stand_still(60.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Coordinator, "next_deadline", fault)
            await settle()
        with pytest.raises(RuntimeError, match="half a step"):
            await driver.failed


@in_virtual_time
async def test_barrier_reports_progress_at_half_and_is_decided_at_its_deadline():
    async with driving(MemoryEngine(), clock=LoopClock()) as driver:
        rank, missing = Rank(driver, 0).hello().arrive(timeout=300.0), Rank(driver, 1).hello()
        looks: list[tuple[float, ProbeRequest]] = []
        driver.probe = lambda look: looks.append((asyncio.get_running_loop().time(), look))
        progress = await rank.hears(Progress)
        assert asyncio.get_running_loop().time() == START + 150
        assert progress.arrived == 1
        decision = await rank.hears(Decision)
        assert asyncio.get_running_loop().time() == START + 300
        assert (decision.outcome, decision.wait) == (Outcome.TIMED_OUT, 300.0)
        assert [at for at, _ in looks] == [START + 148, START + 298], "the missing are asked just before"
        assert [one.session for _, look in looks for one in look.processes] == [missing.id] * 2


@in_virtual_time
async def test_earlier_deadline_moves_the_timer_forward():
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
async def test_void_deadline_decides_nothing():
    async with driving(MemoryEngine(), clock=LoopClock()) as driver:
        zero, one = (Rank(driver, number).hello().arrive(timeout=20.0) for number in range(2))
        await one.hears(Decision)
        zero.messages.clear()
        zero.arrive(1, timeout=300.0)
        assert (await zero.hears(Decision)).outcome is Outcome.TIMED_OUT
        assert asyncio.get_running_loop().time() == START + 300
        assert zero.heard == [Progress, Decision]


@in_virtual_time
async def test_members_that_stay_away_after_a_restart_are_lost_after_the_ttl():
    engine = MemoryEngine()
    async with driving(engine, clock=LoopClock()) as driver:
        zero, one = (Rank(driver, number).hello() for number in range(2))
        await one.hears(GroupJoined)
    async with driving(engine, clock=LoopClock()) as driver:
        zero = Rank(driver, 0, ordinal=of_kind(Welcome, zero.messages[0]).ordinals[0]).hello().arrive()
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
        zero = Rank(driver, 0, ordinal=of_kind(Welcome, zero.messages[0]).ordinals[0]).hello().arrive()
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
async def test_returning_member_is_not_lost_after_a_pause_of_the_coordinator():
    async with driving(MemoryEngine(), clock=LoopClock()) as driver:
        zero, one = (Rank(driver, number).hello() for number in range(2))
        zero.arrive()
        await one.hears(GroupJoined)
        driver.disconnect(one.id)
        driver.submit(Disconnected(one.id))
        await asyncio.sleep(TTL / 2)
        stand_still(TTL)
        await asyncio.sleep(0.5)
        Rank(driver, 1, ordinal=of_kind(Welcome, one.messages[0]).ordinals[0]).hello().arrive()
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


@in_virtual_time
async def test_no_timer_outlives_the_driver():
    async with driving(MemoryEngine(), clock=LoopClock()) as driver:
        rank = Rank(driver, 0).hello().arrive(timeout=5.0)
        await rank.hears(GroupJoined)
    await asyncio.sleep(60)
    assert Decision not in rank.heard


@in_virtual_time
async def test_retired_driver_declares_no_member_lost():
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
