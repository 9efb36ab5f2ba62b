"""Invariant 14 (a restart loses nothing acknowledged)."""

from collections.abc import Callable

from muster.service.core.vocabulary.events import Arrival, Arrive
from muster.service.core.vocabulary.model import MemberState, MissingState, Outcome
from muster.service.core.vocabulary.records import GroupRecord, RankOwnerRecord
from muster.service.core.vocabulary.refusal import Reason
from tests.support.expect import of_kind, some
from tests.support.world.core_client import CKPT, TIMEOUT
from tests.support.world.core_disk import Crash
from tests.support.world.core_world import RUN, TTL, World


def test_restart_loses_no_sequence():
    world = World(2)
    zero, one = world.ranks()
    for sequence in range(4):
        world.crash()
        zero.connect()
        one.connect()
        zero.arrive()
        assert some(one.arrive()).sequence == sequence
    world.assert_good()


def test_restart_loses_no_decision():
    world = World(2)
    zero, one = world.ranks()
    failed = [zero.arrive(failure=reason) for reason in ("a", "b", "c")]
    for _ in range(3):
        world.crash()
    one.connect()
    assert [one.arrive(), one.arrive(), one.arrive()] == failed
    world.assert_good()


def test_restart_keeps_the_owner_and_older_processes_stay_superseded():
    world = World(2)
    older, other = world.ranks()
    newer = world.start(0)
    newer.join()
    world.crash()
    for client in (older, newer, other):
        client.connect()
    assert older.reason is Reason.SUPERSEDED
    other.arrive()
    assert some(newer.arrive()).outcome is Outcome.RELEASED
    world.assert_good()


def test_restart_loses_no_generation():
    world = World(2)
    old = world.start(0)
    world.start(0, generation=2)
    world.crash()
    old.connect()
    assert old.reason is Reason.STALE_GENERATION


def test_restart_keeps_the_start_of_a_restarted_rank():
    world = World(2)
    zero, one = world.ranks()
    zero.arrive()
    one.arrive()
    restarted = world.start(1)
    restarted.join()
    world.crash()
    restarted.connect()
    refused = world.refused(Arrive(some(restarted.session), CKPT, 0, TIMEOUT, (Arrival(1),)))
    assert refused.refusal.reason is Reason.SEQUENCE_BEHIND
    assert restarted.join() == 1


def test_restart_loses_no_shape_a_speaker_still_binds_with_it():
    world = World(2)
    zero, one = world.start(0), world.start(1)
    zero.join(world_size=2)
    one.join(world_size=3)
    world.crash()
    zero.connect()
    assert some(zero.arrive()).outcome is Outcome.MISMATCHED


def test_arrivals_are_soft_the_clients_send_them_again():
    world = World(3)
    zero, one, two = world.ranks()
    zero.arrive(payload=b"0")
    one.arrive(payload=b"1")
    world.crash()
    assert world.group().open is None
    zero.connect()
    one.connect()
    two.connect()
    two.arrive(payload=b"2")
    assert zero.last.payloads == ((0, b"0"), (1, b"1"), (2, b"2"))
    world.assert_good()


def test_after_a_restart_everyone_has_the_session_ttl_to_come_back():
    world = World(2)
    zero, one = world.ranks()
    zero.arrive()
    world.wait(100)
    world.crash()
    zero.connect()
    world.wait(TTL - 0.1)
    assert zero.outcomes == []
    one.connect()
    world.wait(TTL)
    assert some(one.arrive()).outcome is Outcome.RELEASED
    world.assert_good()


def test_after_a_restart_the_dead_are_not_waited_for_longer_than_the_ttl():
    world = World(2)
    zero, one = world.ranks()
    zero.arrive()
    one.die()
    world.crash()
    zero.connect()
    world.wait(TTL)
    assert zero.outcomes == [Outcome.MEMBER_LOST]
    assert zero.last.missing[0].state is MissingState.CONNECTION_LOST


def test_restart_keeps_which_ranks_had_left():
    world = World(2)
    zero, one = world.ranks()
    one.goodbye()
    world.crash()
    zero.connect()
    assert some(zero.arrive()).outcome is Outcome.MEMBER_LOST
    assert zero.last.missing[0].state is MissingState.LEFT


def test_restart_keeps_which_ranks_were_lost_and_came_back():
    world = World(2)
    zero, one = world.ranks()
    one.lose_connection()
    world.wait(TTL)
    one.connect()
    world.crash()
    zero.connect()
    one.connect()
    zero.arrive()
    assert some(one.arrive()).outcome is Outcome.RELEASED


def test_restart_keeps_that_a_rank_arrives_by_unary_calls():
    world = World(2)
    zero = world.start(0)
    zero.join()
    world.hang_up(world.call(1, sequence=0))
    (record,) = (r for r in world.disk.of_kind(RankOwnerRecord) if r.rank == 1)
    assert record.state is MemberState.IDLE
    world.crash()
    zero.connect()
    zero.arrive()
    world.wait(3 * TTL)
    assert zero.outcomes == []
    world.call(1, sequence=0)
    assert zero.outcomes == [Outcome.RELEASED]


def test_restart_keeps_the_membership_of_a_reset_group():
    world = World(2)
    for client in world.ranks():
        client.arrive(failure="no")
        client.goodbye()
    zero = world.start(0)
    assert zero.join() == 1
    assert of_kind(GroupRecord, world.disk.kept[GroupRecord, RUN, CKPT]).first_sequence == 1
    world.crash()
    assert world.start(1).join() == 1


def test_restart_in_any_step_of_a_release_leads_to_one_outcome_for_all():
    for crash in Crash:
        for step in range(6):
            world = World(2)
            zero, one = world.start(0), world.start(1)
            actions: list[Callable[[], object]] = [zero.join, one.join, zero.arrive, one.arrive]
            for number, action in enumerate(actions):
                if number == step:
                    world.crash_next = crash
                action()
                for client in (zero, one):
                    if client.session is None:
                        client.connect()
            assert zero.outcomes == one.outcomes == [Outcome.RELEASED], (crash, step)
            world.assert_good()


def test_nothing_to_restore_is_a_new_beginning():
    world = World(2)
    assert world.coordinator.runs == {}
    assert world.start(0).join() == 0
