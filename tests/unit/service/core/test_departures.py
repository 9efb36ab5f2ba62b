"""Who came and left before others came: the same job, or one that is started again under its old name."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.service.core import views
from muster.service.core.membership.process import SUCCESSION_WINDOW
from muster.service.core.vocabulary.effects import RankOwnerRecord
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import Decision, MemberState, MissingState, Outcome
from muster.service.core.vocabulary.refusal import Reason
from tests.support.expect import some
from tests.support.world.core_world import CKPT, RUN, TIMEOUT, TTL, Client, Crash, World


@pytest.fixture
def world():
    return World(2)


def standings(world):
    members = views.members(world.coordinator.runs[RUN], world.instant)
    return [(member.rank, member.state) for member in members]


@pytest.mark.parametrize("joined", [True, False])
def test_one_who_left_before_the_next_said_hello_fails_the_barrier_that_needs_it_at_once(world, joined):
    one = world.start(1, connect=False)
    world.wait(1.0)
    zero = world.start(0)
    if joined:
        zero.join()
    zero.goodbye()
    world.wait(20.0)
    one.connect()
    assert standings(world) == [(0, MemberState.LEFT), (1, MemberState.CONNECTED)]
    decision = one.arrive()
    assert decision.outcome is Outcome.MEMBER_LOST
    (missing,) = decision.missing
    assert (missing.rank, missing.state, missing.gone_for) == (0, MissingState.LEFT, 20.0)
    assert f"rank 0 (node-0, pid {zero.pid}, left 20 s ago)" in decision.message
    world.assert_good()


def test_so_does_one_who_was_lost_before_the_next_said_hello(world):
    one = world.start(1, connect=False)
    world.wait(1.0)
    world.start(0).die()
    world.wait(2 * TTL)
    one.connect()
    assert some(one.arrive()).missing[0].state is MissingState.CONNECTION_LOST


def test_one_who_began_before_the_loss_of_the_last_life_was_noticed_waits(world):
    """As the job is started again on other nodes, when one was switched off."""
    zero = world.start(0)
    zero.join()
    world.wait(1.0)
    zero.stream_breaks()
    world.wait(2.0)
    one = world.start(1, connect=False)
    world.wait(TTL * 2 / 3)
    world.coordinator_sees_it(zero)
    world.wait(TTL + 1.0)
    one.connect()
    assert one.arrive() is None
    world.start(0).arrive()
    assert one.outcomes == [Outcome.RELEASED]


def test_one_who_began_after_all_had_left_waits_and_is_told_who_was_there(world):
    zero = world.start(0)
    zero.goodbye()
    world.wait(20.0)
    one = world.start(1)
    assert standings(world) == [(0, MemberState.LEFT), (1, MemberState.CONNECTED)]
    assert one.arrive() is None
    world.wait(TIMEOUT)
    assert one.last.outcome is Outcome.TIMED_OUT
    assert one.last.missing[0].state is MissingState.LEFT
    assert f"rank 0 (node-0, pid {zero.pid}, left 320 s ago)" in one.last.message


def test_the_rank_that_left_may_come_again_and_leave_again(world):
    world.start(0).goodbye()
    world.wait(1.0)
    one = world.start(1)
    one.arrive()
    again = world.start(0)
    assert one.outcomes == []
    again.goodbye()
    assert one.outcomes == [Outcome.MEMBER_LOST]
    world.assert_good()


def test_a_job_started_again_with_a_larger_world_does_not_fail_with_a_past_that_was_complete(world):
    late = world.start(2, connect=False)
    for client in world.ranks():
        client.goodbye()
    late.connect()
    late.join(world_size=3)
    late.arrive()
    assert standings(world) == [(2, MemberState.CONNECTED)]
    for rank in range(2):
        client = world.start(rank)
        client.join(world_size=3)
        client.arrive()
    assert late.outcomes == [Outcome.RELEASED]


def test_one_that_does_not_tell_since_when_it_runs_waits(world):
    world.start(0).goodbye()
    world.call(1)
    assert standings(world) == [(0, MemberState.LEFT), (1, MemberState.CONNECTED)]
    assert world.group().open is not None


def test_after_a_restart_of_the_coordinator_those_who_were_there_still_know_who_left():
    world = World(3)
    zero = world.start(0)
    zero.join()
    one = world.start(1)
    zero.goodbye()
    world.crash()
    one.connect()
    assert some(one.arrive()).missing[0].state is MissingState.LEFT


def test_after_a_restart_of_the_coordinator_newcomers_wait_for_those_who_left_before(world):
    one = world.start(1, connect=False)
    zero = world.start(0)
    zero.join()
    zero.goodbye()
    world.crash()
    one.connect()
    assert standings(world) == [(0, MemberState.LEFT), (1, MemberState.CONNECTED)]
    assert one.arrive() is None
    assert world.start(0).arrive().outcome is Outcome.RELEASED
    assert one.outcomes == [Outcome.RELEASED]


ranks = st.integers(0, 3)
pauses = st.sampled_from([0.0, 0.5, 3.0, 2 * TTL])
ends = st.sampled_from(["left", "lost"])


def end(world, client, how):
    client.goodbye() if how == "left" else client.die()


@settings(max_examples=200, deadline=None)
@given(
    early=st.lists(
        st.tuples(ranks, ends, st.booleans()), min_size=1, max_size=3, unique_by=lambda one: one[0]
    ),
    pause=pauses,
)
def test_whoever_was_running_when_the_others_left_is_told_at_once(early, pause):
    world = World(4)
    gone = {rank for rank, _, _ in early}
    late = [world.start(rank, connect=False) for rank in range(4) if rank not in gone]
    world.wait(1.0)
    for rank, how, joins in early:
        client = world.start(rank)
        if joins:
            client.join()
        end(world, client, how)
    world.wait(TTL + pause)
    for client in late:
        client.connect()
    for client in late:
        decision = some(client.arrive())
        assert decision.outcome is Outcome.MEMBER_LOST
        assert gone <= {one.rank for one in decision.missing if one.state is not MissingState.NEVER_JOINED}
    world.assert_good()


lives = st.lists(st.tuples(ranks, ends, st.sampled_from(["hello", "join", "arrive"])), min_size=1, max_size=6)


@settings(max_examples=400, deadline=None)
@given(
    past=st.lists(st.tuples(lives, st.sampled_from([2, 4])), min_size=1, max_size=3),
    size=st.sampled_from([2, 4]),
    order=st.permutations(range(4)),
    pauses=st.lists(pauses, min_size=4, max_size=4),
    crashes=st.lists(st.sampled_from([None, None, *Crash]), min_size=4, max_size=4),
    unnoticed=st.sampled_from([0.0, 3.0, TTL]),
)
def test_a_job_started_again_never_fails_with_the_goodbyes_of_its_past(
    past, size, order, pauses, crashes, unnoticed
):
    """Whoever was there in its past, whatever they did, and in whatever order its ranks come now.

    Its processes begin when those before them have ended, of which the coordinator may hear later.
    """
    world = World(4)
    for life, past_size in past:
        before = [(world.start(rank % past_size), how, did) for rank, how, did in life]
        for client, _, did in before:
            if did != "hello":
                client.join(world_size=past_size)
            if did == "arrive" and client.seats[CKPT].position is not None:
                client.arrive()
        for client, how, _ in before:
            if client.session is not None:
                client.goodbye() if how == "left" else client.stream_breaks()
            client.alive = False
        world.wait(unnoticed / 2)
        starting = [world.start(rank, connect=False) for rank in order if rank < size]
        world.wait(unnoticed / 2)
        for client, _, _ in before:
            world.coordinator_sees_it(client)
        world.wait(TTL + 1.0)
    began = len(world.disk.decided.get((RUN, CKPT), ()))
    clients: list[Client] = []
    for client, pause, crash in zip(starting, pauses, crashes, strict=False):
        client.connect()
        if crash is not None:
            world.crash_next = crash
        for other in (*clients, client):
            if other.session is None and other.alive:
                other.connect()
        client.join(world_size=size)
        if client.session is None:
            client.connect()
        client.arrive()
        for other in (*clients, client):
            if other.session is None:
                other.connect()
        clients.append(client)
        world.wait(pause)
    assert [client.outcomes for client in clients] == [[Outcome.RELEASED]] * size
    assert len(world.disk.decided[RUN, CKPT]) >= began + 1
    world.assert_good()


# ---------------------------------------------------------------------- processes that outlive their group


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
        assert [decision.outcome for decision in client.seats[CKPT].heard] == [Outcome.RELEASED]
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


def test_rank_hears_its_release_when_it_was_away_twice_and_nothing_was_decided_in_between():
    world = World(3)
    one, two = released_unheard(world)
    world.start(0).die()
    world.wait(TTL + 1.0)
    world.start(0)
    one.seats[CKPT].waiting = False
    one.connect()
    one.seats[CKPT].waiting = True
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


def test_state_of_the_version_before_tells_its_speakers_apart_from_those_of_the_next_life():
    world = World(3)
    one, _ = released_unheard(world)
    for key, record in world.disk.kept.items():
        if isinstance(record, RankOwnerRecord):
            world.disk.kept[key] = replace(record, life=None)
    world.crash()
    world.wait(TTL + 1.0)
    world.start(0)
    world.crash()
    assert world.group().owners == {}
    one.connect()
    assert one.outcomes == [Outcome.RELEASED]


@pytest.mark.parametrize("time", [1.0, SUCCESSION_WINDOW])
def test_new_process_that_came_first_is_waited_for_a_while_after_the_old_one_died(time):
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
    """A new process of a rank begins another life, in which one barrier times out."""
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


def test_new_process_of_the_rank_is_not_told_of_the_release():
    world = World(3)
    released_unheard(world)
    again = world.start(1)
    again.join()
    assert again.seats[CKPT].position == 1


def test_older_process_is_refused_when_a_newer_one_of_its_rank_joined():
    world = World(3)
    one, _ = released_unheard(world)
    world.start(1).join()
    world.crash()
    one.connect()
    assert one.reason is Reason.SUPERSEDED
    world.assert_good()


def test_next_release_forgets_who_may_not_have_heard_the_one_before():
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


def test_new_generation_forgets_who_may_not_have_heard_a_release():
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


def test_older_process_that_was_superseded_before_is_refused_when_the_newer_one_is_away():
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
