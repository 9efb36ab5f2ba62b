"""Payloads of unused runs make room for those of other runs, and of no others."""

import pytest

from muster.service.core.retention.retention import USE_RECORD_INTERVAL
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import Outcome
from muster.service.core.vocabulary.refusal import Reason
from tests.support.world.core_client import CKPT, Client
from tests.support.world.core_world import TTL, World

MOST = Limits(max_total_gather_bytes=800)
"""Seven eighths of it are for barriers of any size."""


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
    release(world, "job", b"x" * 10)
    assert (kept(world, "old"), kept(world, "newer"), kept(world, "job")) == (0, 350, 10)
    assert world.coordinator.gathered.bytes == 360
    old = world.group(run="old").decisions[0]
    assert (old.outcome, old.payloads_dropped) == (Outcome.RELEASED, True)
    world.assert_good()


def test_payloads_stay_while_there_is_room():
    world = World(1, limits=MOST)
    fill(world)
    world.wait(USE_RECORD_INTERVAL)
    client = world.start(0, run="job")
    client.arrive()
    assert client.outcomes == [Outcome.RELEASED]
    assert (kept(world, "old"), kept(world, "newer")) == (350, 350)


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
        client.arrive(payload=b"x" * 10)
    assert kept(world, "old") == 0
    if restart:
        world.crash()
    zero.connect()
    assert zero.reason is Reason.SEQUENCE_FORGOTTEN
    assert "are no longer kept" in zero.refusals[-1].refusal.message
    assert zero.seats[CKPT].position == 1
    zero.arrive()
    world.start(1, run="old").arrive()
    assert [decision.sequence for decision in zero.seats[CKPT].heard] == [1]
    world.assert_good()
