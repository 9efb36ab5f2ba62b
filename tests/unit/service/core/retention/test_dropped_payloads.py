"""Payloads of unused runs make room for those of other runs, and of no others."""

from dataclasses import replace

import pytest

from muster.client.save_votes import PREFIX
from muster.service.core.retention.retention import USE_RECORD_INTERVAL
from muster.service.core.retention.unused_payloads import UnusedPayloads
from muster.service.core.run import Run
from muster.service.core.vocabulary.events import Arrival, Arrive
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import Instant, Outcome
from muster.service.core.vocabulary.refusal import Reason
from tests.support.world.core_client import CKPT, Client
from tests.support.world.core_world import TTL, World

MOST = Limits(max_total_gather_bytes=800)
"""Barriers of any size share the first seven eighths; these small ones may have all."""


def release(world: World, run: str, payload: bytes) -> Client:
    """The only rank of a run arrives with a payload."""
    client = world.start(0, run=run)
    client.arrive(payload=payload)
    assert client.outcomes == [Outcome.RELEASED]
    return client


def kept(world: World, run: str) -> int:
    return sum(decision.payload_bytes for decision in world.group(run=run).decisions.values())


def fill(world: World) -> None:
    """Two runs that are over hold the room of all large payloads."""
    for run in ("old", "newer"):
        release(world, run, b"x" * 350).goodbye()
        world.wait(1.0)


def test_runs_that_are_unused_for_long_make_room_oldest_first():
    world = World(1, limits=MOST)
    fill(world)
    world.wait(USE_RECORD_INTERVAL)
    release(world, "job", b"x" * 101)
    assert (kept(world, "old"), kept(world, "newer"), kept(world, "job")) == (0, 350, 101)
    assert world.coordinator.gathered.bytes == 451
    old = world.group(run="old").decisions[0]
    assert (old.outcome, old.payloads_dropped) == (Outcome.RELEASED, True)
    world.assert_good()


def test_payloads_stay_while_there_is_room():
    world = World(1, limits=MOST)
    fill(world)
    world.wait(USE_RECORD_INTERVAL)
    release(world, "job", b"x" * 100)
    assert (kept(world, "old"), kept(world, "newer")) == (350, 350)


@pytest.mark.parametrize("how", ["too large", "ahead", "decided before", "arrived before"])
def test_arrival_that_adds_no_payload_drops_none(how: str):
    world = World(2, limits=replace(MOST, max_payload_bytes=500))
    for run in ("old", "newer"):
        for rank in range(2):
            world.start(rank, run=run).arrive(payload=b"x" * 175)
    for client in world.clients:
        client.goodbye()
    world.wait(USE_RECORD_INTERVAL + 1.0)
    zero, one = (world.start(rank, run="job") for rank in range(2))
    for client in (zero, one):
        client.arrive()
    sequence = {"too large": 1, "ahead": 7, "decided before": 0, "arrived before": 1}[how]
    if how == "arrived before":
        zero.arrive()
    payload = b"x" * (501 if how == "too large" else 450)
    assert zero.session is not None
    world.do(Arrive(zero.session, CKPT, sequence, 300.0, (Arrival(0, payload=payload),)))
    assert (kept(world, "old"), kept(world, "newer")) == (350, 350)


def test_nothing_is_dropped_that_does_not_make_enough_room():
    world = World(1, limits=MOST)
    release(world, "old", b"x" * 350).goodbye()
    world.wait(USE_RECORD_INTERVAL)
    release(world, "used", b"x" * 350)
    client = world.start(0, run="job")
    client.arrive(payload=b"x" * 451)
    assert client.outcomes == [Outcome.ABORTED]
    assert (kept(world, "old"), kept(world, "used")) == (350, 350)


def test_runs_are_not_counted_again_before_another_may_be_unused(monkeypatch: pytest.MonkeyPatch):
    world = World(1, limits=MOST)
    fill(world)
    count, counted = UnusedPayloads._count, []

    def counting(self: UnusedPayloads, now: Instant) -> list[Run]:
        counted.append(now)
        return count(self, now)

    monkeypatch.setattr(UnusedPayloads, "_count", counting)
    client = world.start(0, run="job")
    for _ in range(3):
        client.arrive(payload=b"x" * 101)
        world.wait(1.0)
    assert client.outcomes == [Outcome.ABORTED] * 3
    assert len(counted) == 1
    world.wait(USE_RECORD_INTERVAL)
    client.arrive(payload=b"x" * 101)
    assert client.outcomes[-1] is Outcome.RELEASED
    assert (kept(world, "old"), kept(world, "newer")) == (0, 350)


def test_votes_about_saves_are_kept():
    world = World(1, limits=MOST)
    client = world.start(0, run="old")
    client.arrive(PREFIX, payload=b"x" * 10)
    client.goodbye()
    release(world, "older", b"x" * 690).goodbye()
    world.wait(2 * USE_RECORD_INTERVAL)
    release(world, "job", b"x" * 101)
    (vote,) = world.group(PREFIX, run="old").decisions.values()
    assert vote.payload_bytes == 10


@pytest.mark.parametrize("how", ["connected", "just left", "coordinator just began"])
def test_runs_that_clients_may_come_back_to_keep_their_payloads(how: str):
    world = World(1, limits=MOST)
    fill(world)
    if how == "connected":
        for run in ("old", "newer"):
            world.start(0, run=run)
    if how != "just left":
        world.wait(USE_RECORD_INTERVAL)
    if how == "coordinator just began":
        world.crash()
    client = world.start(0, run="job")
    client.arrive(payload=b"x" * 101)
    assert client.outcomes == [Outcome.ABORTED]
    assert "max_total_gather_bytes" in client.last.message
    assert (kept(world, "old"), kept(world, "newer")) == (350, 350)


@pytest.mark.parametrize("restart", [False, True])
def test_rank_does_not_hear_a_release_after_its_payloads_were_dropped(restart: bool):
    world = World(2, limits=MOST)
    zero, one = (world.start(rank, run="old") for rank in range(2))
    zero.arrive(payload=b"x" * 700)
    zero.lose_connection()
    assert one.arrive() is not None
    one.goodbye()
    world.wait(TTL + 2 * USE_RECORD_INTERVAL)
    for client in [world.start(rank, run="job") for rank in range(2)]:
        client.arrive(payload=b"x" * 60)
    assert kept(world, "old") == 0
    if restart:
        world.crash()
    zero.connect()
    assert zero.reason is Reason.SEQUENCE_FORGOTTEN
    assert "are no longer kept" in zero.refusals[-1].refusal.message
    assert zero.memberships[CKPT].position == 1
    zero.arrive()
    world.start(1, run="old").arrive()
    assert [decision.sequence for decision in zero.memberships[CKPT].heard] == [1]
    world.assert_good()
