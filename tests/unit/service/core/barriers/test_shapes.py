"""A list of participants is kept once for all the ranks that bring it."""

from dataclasses import replace

import pytest

from muster.service.core.coordinator import Coordinator
from muster.service.core.vocabulary.model import MemberState, Outcome, Ranks, Shape
from muster.service.core.vocabulary.records import (
    ForgetShape,
    GroupRecord,
    RankOwnerRecord,
    Record,
    RunRecord,
    ShapeRecord,
)
from muster.service.storage import codec
from muster.v1 import state_pb2
from tests.support.world.core_client import CKPT, Client
from tests.support.world.core_world import RUN, TTL, World

HALF = (0, 2, 4)


def joined(world: World, participants: tuple[int, ...] = HALF) -> list[Client]:
    clients = [world.start(rank) for rank in participants]
    for client in clients:
        client.join(participants=participants)
    return clients


def shapes(world: World) -> dict[int, Shape]:
    """The shapes on disk, by number."""
    return {one.number: one.shape for one in world.disk.kept.values() if isinstance(one, ShapeRecord)}


def owners(world: World) -> list[RankOwnerRecord]:
    return [one for one in world.disk.kept.values() if isinstance(one, RankOwnerRecord)]


def release(clients: list[Client]) -> None:
    for client in clients:
        client.arrive()
    assert {client.last.outcome for client in clients} == {Outcome.RELEASED}


def test_ranks_of_a_subset_share_one_record_of_their_participants():
    world = World(6)
    release(joined(world))
    assert shapes(world) == {1: Shape(6, Ranks(HALF))}
    assert [owner.shape for owner in owners(world)] == [1, 1, 1]


def test_state_of_a_subset_grows_linearly_with_its_ranks():
    def bytes_per_rank(size: int) -> float:
        world = World(size)
        joined(world, tuple(range(0, size, 2)))
        rows = codec.encode_all(world.disk.kept.values()).writes
        return sum(len(value or b"") for value in rows.values()) / size

    assert bytes_per_rank(256) < 1.2 * bytes_per_rank(32)


def test_whole_world_has_no_record_of_its_own():
    """So a coordinator of the last release reads it."""
    world = World(2)
    release(world.ranks())
    assert shapes(world) == {}
    assert {owner.shape for owner in owners(world)} == {Shape(2)}


def test_ranks_that_come_back_after_a_crash_write_no_second_record():
    world = World(6)
    clients = joined(world)
    world.crash()
    for client in clients:
        client.connect()
    release(clients)
    assert len(shapes(world)) == 1


def test_shape_is_forgotten_when_its_last_owner_brings_another():
    world = World(6)
    joined(world, (0,))
    newer = world.start(0)
    newer.join(participants=(0, 1))
    assert shapes(world) == {2: Shape(6, Ranks((0, 1)))}


def test_shapes_are_forgotten_with_the_life_of_their_group():
    world = World(6)
    clients = joined(world)
    for client in clients:
        client.goodbye()
    joined(world, (0, 1))
    assert shapes(world) == {1: Shape(6, Ranks((0, 1)))}
    assert {owner.shape for owner in owners(world)} == {1}


def test_rank_of_two_lives_ago_is_not_taken_for_an_owner_after_a_crash():
    """It arrived at the newest release, so its record is kept; its shape's record is not."""
    world = World(2)
    client = world.start(1)
    client.join(participants=(1,))
    release([client])
    for newcomer in range(2):
        for one in list(world.streams.values()):
            one.lose_connection()
        world.wait(TTL + 1.0)
        world.start(0, incarnation=f"newcomer-{newcomer}")
        if newcomer == 0:
            client.connect()
    world.crash()
    group = world.group()
    assert (group.first_sequence, list(group.owners)) == (1, [])
    client.connect()
    release([client])


def test_new_generation_forgets_the_shapes_of_the_one_before():
    world = World(6)
    joined(world)
    world.start(0, generation=1).join(participants=(0,))
    assert shapes(world) == {1: Shape(6, Ranks((0,)))}


class TestOlderState:
    """Up to release 0.1.0, and for a while after it, each owner's record had the participants."""

    def rows(self) -> list[tuple[bytes, bytes]]:
        owner = RankOwnerRecord(
            run_id=RUN,
            prefix=CKPT,
            rank=0,
            incarnation="p0",
            ordinal=1,
            host="node-0",
            pid=7,
            start_sequence=0,
            shape=Shape(6, Ranks(HALF)),
            state=MemberState.DISCONNECTED,
            lineage=1,
        )
        owned = [
            replace(owner, rank=rank, incarnation=f"p{rank}", ordinal=1 + rank, lineage=1 + rank)
            for rank in HALF
        ]
        kept: list[Record] = [RunRecord(RUN, 0), GroupRecord(RUN, CKPT, 0, 0), *owned]
        return [(key, value) for key, value in codec.encode_all(kept).writes.items() if value is not None]

    def restored(self) -> World:
        world = World(6)
        world.disk.write(codec.decode_all(self.rows()))
        world.start_coordinator()
        return world

    def test_older_rows_have_their_participants(self):
        messages = [
            state_pb2.SpeakerRecord.FromString(value)
            for key, value in self.rows()
            if key.startswith(b"speaker")
        ]
        assert [tuple(message.participants) for message in messages] == [HALF] * 3
        assert [message.shape for message in messages] == [0] * 3

    def test_owners_restored_from_older_rows_share_one_shape(self):
        core = Coordinator()
        core.restore(codec.decode_all(self.rows()), World(6).instant)
        owners = core.group(RUN, CKPT).owners.values()
        assert len({id(speaker.shape) for speaker in owners}) == 1

    def test_ranks_come_back_to_older_rows_and_are_released(self):
        world = self.restored()
        clients = [world.start(rank, incarnation=f"p{rank}") for rank in HALF]
        for client in clients:
            client.join(participants=HALF)
        release(clients)
        world.crash()
        for client in clients:
            client.connect()
        release(clients)

    def test_newer_process_of_an_older_row_writes_the_shape(self):
        world = self.restored()
        world.start(0, incarnation="newer").join(participants=HALF)
        assert shapes(world) == {1: Shape(6, Ranks(HALF))}
        assert {owner.rank: owner.shape for owner in owners(world)}[0] == 1
        world.crash()
        assert len(world.group().owners) == 3


def test_coordinator_start_fails_if_a_shape_record_is_missing():
    world = World(6)
    joined(world)
    world.disk.kept.pop((ShapeRecord, RUN, CKPT, 1))
    with pytest.raises(KeyError, match="shape 1"):
        world.start_coordinator()


def test_forgotten_shape_is_deleted_before_its_number_is_reused():
    writes = codec.encode_all(
        [ForgetShape(RUN, CKPT, 1), ShapeRecord(RUN, CKPT, 1, Shape(6, Ranks((0, 1))))]
    ).writes
    assert [value is None for value in writes.values()] == [False]
