"""Processes that left before others came: the same job, or a restarted one of the same name."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.service.core import views
from muster.service.core.vocabulary.model import MemberState, MissingState, Outcome
from tests.support.expect import some
from tests.support.world.core_client import CKPT, TIMEOUT, Client
from tests.support.world.core_disk import Crash
from tests.support.world.core_world import RUN, TTL, World


@pytest.fixture
def world():
    return World(2)


def standings(world):
    members = views.members(world.coordinator.runs[RUN], world.instant)
    return [(member.rank, member.state) for member in members]


@pytest.mark.parametrize("joined", [True, False])
def test_goodbye_before_the_next_hello_fails_the_barrier_at_once(world, joined):
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


def test_loss_before_the_next_hello_fails_the_barrier_at_once(world):
    one = world.start(1, connect=False)
    world.wait(1.0)
    world.start(0).die()
    world.wait(2 * TTL)
    one.connect()
    assert some(one.arrive()).missing[0].state is MissingState.CONNECTION_LOST


def test_newcomer_that_started_before_a_noticed_loss_waits(world):
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


def test_newcomer_after_all_left_waits_and_learns_which_ranks_left(world):
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


def test_rank_that_left_may_come_again_and_leave_again(world):
    world.start(0).goodbye()
    world.wait(1.0)
    one = world.start(1)
    one.arrive()
    again = world.start(0)
    assert one.outcomes == []
    again.goodbye()
    assert one.outcomes == [Outcome.MEMBER_LOST]
    world.assert_good()


def test_restarted_job_with_a_larger_world_ignores_a_complete_past(world):
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


def test_earlier_ranks_still_find_left_ranks_gone_after_a_restart():
    world = World(3)
    zero = world.start(0)
    zero.join()
    one = world.start(1)
    zero.goodbye()
    world.crash()
    one.connect()
    assert some(one.arrive()).missing[0].state is MissingState.LEFT


def test_newcomers_wait_for_left_ranks_after_a_restart(world):
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
def test_process_that_ran_when_others_left_fails_at_once(early, pause):
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


memberships = st.lists(
    st.tuples(ranks, ends, st.sampled_from(["hello", "join", "arrive"])), min_size=1, max_size=6
)


@settings(max_examples=400, deadline=None)
@given(
    past=st.lists(st.tuples(memberships, st.sampled_from([2, 4])), min_size=1, max_size=3),
    size=st.sampled_from([2, 4]),
    order=st.permutations(range(4)),
    pauses=st.lists(pauses, min_size=4, max_size=4),
    crashes=st.lists(st.sampled_from([None, None, *Crash]), min_size=4, max_size=4),
    unnoticed=st.sampled_from([0.0, 3.0, TTL]),
)
def test_restarted_job_never_fails_by_earlier_goodbyes(past, size, order, pauses, crashes, unnoticed):
    """A restarted job waits for its ranks, whichever processes it had before and in any order of arrival.

    Its processes begin when those before them have ended, of which the coordinator may hear later.
    """
    world = World(4)
    for membership, past_size in past:
        before = [(world.start(rank % past_size), how, did) for rank, how, did in membership]
        for client, _, did in before:
            if did != "hello":
                client.join(world_size=past_size)
            if did == "arrive" and client.memberships[CKPT].position is not None:
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
