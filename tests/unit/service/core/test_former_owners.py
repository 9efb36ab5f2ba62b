"""A process that outlives a reset of its group still hears the release at which it arrived."""

from dataclasses import replace

import pytest

from muster.service.core.membership.process import SUCCESSION_WINDOW
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import Decision, Outcome
from muster.service.core.vocabulary.records import RankOwnerRecord
from muster.service.core.vocabulary.refusal import Reason
from tests.support.expect import some
from tests.support.world.core_client import CKPT
from tests.support.world.core_world import TTL, World


@pytest.fixture
def world():
    return World(2)


def partition(world, *clients):
    """Their network fails, and the coordinator does not see that yet."""
    for client in clients:
        client.stream_breaks()


def heal(world, *clients):
    """They come back."""
    for client in clients:
        client.connect()


def released_unheard(world):
    """Ranks 0 to 2 arrived at #0, which was released, and ranks 1 and 2 have not heard that."""
    zero, one, two = world.ranks(3)
    one.arrive(payload=b"1")
    two.arrive(payload=b"2")
    partition(world, one, two)
    assert zero.arrive(payload=b"0").outcome is Outcome.RELEASED
    zero.die()
    for client in (one, two):
        world.coordinator_sees_it(client)
    world.wait(TTL + 1.0)
    return one, two


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("newcomer", [0, 3])
def test_rank_hears_its_release_when_a_new_process_came_first(newcomer, restarts, joins):
    world = World(3)
    one, two = released_unheard(world)
    new = world.start(newcomer)
    if joins:
        new.join(world_size=max(3, newcomer + 1))
    if restarts:
        world.crash()
    heal(world, one, two)
    for client in (one, two):
        assert [decision.outcome for decision in client.memberships[CKPT].heard] == [Outcome.RELEASED]
        assert client.last.payloads == ((0, b"0"), (1, b"1"), (2, b"2"))
        assert client.refusals == []
    world.assert_good()


def test_rank_goes_on_with_the_new_process_after_it_heard_its_release(world):
    world = World(3)
    one, two = released_unheard(world)
    zero = world.start(0)
    zero.join()
    heal(world, one, two)
    for client in (zero, one, two):
        client.arrive()
    assert [client.last.sequence for client in (zero, one, two)] == [1, 1, 1]
    assert [client.outcomes for client in (one, two)] == [[Outcome.RELEASED] * 2] * 2
    world.assert_good()


def test_rank_hears_its_release_after_several_lives_that_released_nothing():
    world = World(3)
    one, two = released_unheard(world)
    for _ in range(3):
        zero = world.start(0)
        zero.arrive(timeout=1.0)
        world.wait(2.0)
        assert zero.last.outcome is Outcome.TIMED_OUT
        zero.die()
        world.wait(TTL + 1.0)
    world.crash()
    world.start(0).join()
    heal(world, one, two)
    assert one.outcomes == [Outcome.RELEASED]
    for _ in range(3):
        assert some(one.arrive()).outcome is Outcome.TIMED_OUT
    assert one.arrive() is None
    world.assert_good()


def test_rank_hears_its_release_after_two_absences_without_a_decision():
    world = World(3)
    one, two = released_unheard(world)
    world.start(0).die()
    world.wait(TTL + 1.0)
    world.start(0)
    one.memberships[CKPT].waiting = False
    one.connect()
    one.memberships[CKPT].waiting = True
    partition(world, *(client for client in world.clients if client.session is not None))
    for client in world.clients:
        world.coordinator_sees_it(client)
    world.wait(TTL + 1.0)
    world.start(2)
    world.crash()
    assert world.group().owners == {}
    heal(world, one)
    assert one.outcomes == [Outcome.RELEASED]
    assert two.outcomes == []
    world.assert_good()


def test_state_before_0_2_0_keeps_owners_of_two_memberships_apart():
    world = World(3)
    one, _ = released_unheard(world)
    for key, record in world.disk.kept.items():
        if isinstance(record, RankOwnerRecord):
            world.disk.kept[key] = replace(record, membership_start=None)
    world.crash()
    world.wait(TTL + 1.0)
    world.start(0)
    world.crash()
    assert world.group().owners == {}
    one.connect()
    assert one.outcomes == [Outcome.RELEASED]


@pytest.mark.parametrize("time", [1.0, SUCCESSION_WINDOW])
def test_newer_process_counts_as_successor_for_a_while(time):
    world = World(3)
    one, two = released_unheard(world)
    zero, new = world.start(0), world.start(1)
    world.wait(SUCCESSION_WINDOW + 1.0)
    heal(world, one, two)
    for client in (zero, two):
        client.arrive()
    one.die()
    world.wait(max(time, TTL + 1.0))
    if time < SUCCESSION_WINDOW:
        new.arrive()
        assert [client.last.sequence for client in (zero, two)] == [1, 1]
        assert zero.last.outcome is Outcome.RELEASED
    else:
        assert zero.last.outcome is Outcome.MEMBER_LOST
    world.assert_good()


def released_by_calls(world):
    """Ranks 0 and 1 arrived at #0 by unary calls, heard of its release, and have not called for long."""
    calls = [world.call(0), world.call(1)]
    for call in calls:
        world.hang_up(call)
    world.wait(TTL + 1.0)


def answers_of_calls(world, rank, count):
    """What so many calls of a rank are answered, one after the other."""
    answers = []
    for _ in range(count):
        call = world.arrive_once(rank)
        answers += world.ask(call)
        world.hang_up(call.session)
    return answers


def fail_alone(world, rank):
    """A new process of a rank begins another membership, in which one barrier times out."""
    alone = world.start(rank)
    alone.arrive(timeout=1.0)
    world.wait(2.0)
    alone.die()
    world.wait(TTL + 1.0)


def test_calls_of_an_earlier_life_get_further_each_time():
    world = World(2)
    released_by_calls(world)
    fail_alone(world, 0)
    (missed,) = answers_of_calls(world, 1, 3)
    assert (missed.sequence, missed.outcome) == (1, Outcome.TIMED_OUT)
    assert some(world.group().open).sequence == 2


def test_calls_of_an_earlier_life_go_on_at_the_oldest_barrier_that_is_kept():
    world = World(2, limits=Limits(max_unheard_decisions=4))
    released_by_calls(world)
    for _ in range(6):
        fail_alone(world, 0)
    missed = answers_of_calls(world, 1, 5)
    assert [decision.sequence for decision in missed] == [3, 4, 5, 6]
    assert some(world.group().open).sequence == 7


def test_newer_process_of_the_rank_does_not_hear_the_release():
    world = World(3)
    released_unheard(world)
    again = world.start(1)
    again.join()
    assert again.memberships[CKPT].position == 1


def test_older_process_is_refused_when_a_newer_one_of_its_rank_joined():
    world = World(3)
    one, _ = released_unheard(world)
    world.start(1).join()
    world.crash()
    one.connect()
    assert one.reason is Reason.SUPERSEDED
    world.assert_good()


def test_next_release_forgets_former_owners():
    world = World(3)
    one, two = released_unheard(world)
    for rank in range(3):
        client = world.start(rank)
        client.join()
        client.arrive()
    kept = {(record.rank, record.incarnation) for record in world.disk.of_kind(RankOwnerRecord)}
    assert not kept & {(1, one.incarnation), (2, two.incarnation)}
    assert len(kept) == 3


def test_next_release_without_the_rank_forgets_it():
    world = World(3)
    one, _ = released_unheard(world)
    world.world_size = 1
    assert some(world.start(0).arrive()).outcome is Outcome.RELEASED
    assert [record.rank for record in world.disk.of_kind(RankOwnerRecord)] == [0]
    one.connect()
    assert one.reason is Reason.SEQUENCE_BEHIND
    assert one.refusals[-1].refusal.metadata["start_sequence"] == "2"


def test_new_generation_forgets_former_owners():
    world = World(3)
    one, _ = released_unheard(world)
    world.start(0).join()
    world.start(0, generation=1).join()
    assert [record.rank for record in world.disk.of_kind(RankOwnerRecord)] == [0]
    one.connect()
    assert one.reason is Reason.STALE_GENERATION


def test_lives_without_a_release_keep_a_bounded_number_of_decisions():
    world = World(2, limits=Limits(max_unheard_decisions=20))
    for _ in range(50):
        zero = world.start(0)
        zero.arrive(timeout=1.0)
        world.wait(2.0)
        zero.die()
        world.wait(TTL + 1.0)
    assert len(world.disk.of_kind(Decision)) == 20


def test_superseded_process_is_refused_while_the_newer_one_is_away():
    world = World(1)
    old = world.start(0)
    old.join()
    new = world.start(0)
    new.join()
    old.stream_breaks()
    new.arrive()
    partition(world, new)
    for client in (old, new):
        world.coordinator_sees_it(client)
    world.wait(TTL + 1.0)
    world.start(1)
    world.crash()
    old.connect()
    assert old.reason is Reason.SUPERSEDED
    assert old.refusals[-1].refusal.metadata["newer_pid"] == str(new.pid)
