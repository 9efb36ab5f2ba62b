"""Timeouts that outlive a coordinator: how much of them has passed, and what waiting ranks hear."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.service.core.elapsed import RECONNECT_GRACE, elapsed
from muster.service.core.vocabulary.effects import Progress, Refused
from muster.service.core.vocabulary.events import Arrival, Arrive
from muster.service.core.vocabulary.model import MissingState, NodeStanding, Outcome
from muster.service.core.vocabulary.refusal import Reason
from tests.support.expect import some
from tests.support.world.core_client import CKPT, TIMEOUT, Client
from tests.support.world.core_world import RUN, World
from tests.support.world.rendezvous_world import JOIN, RendezvousWorld, nodes

HUGE = (2**64 - 1) / 1000
"""Seconds: the most that the wire can say."""

timeouts = st.floats(0.001, 30 * 86_400)
waits = st.one_of(st.floats(0, 100), st.floats(0, HUGE))


# ---------------------------------------------------------------------- the arithmetic


@given(timeout=timeouts, waited=waits)
def test_elapsed_is_at_most_the_wait_and_the_timeout(timeout: float, waited: float):
    assert 0 <= elapsed(waited, timeout) <= min(waited, timeout)


@given(timeout=timeouts, one=waits, other=waits)
def test_longer_wait_leaves_less_time(timeout: float, one: float, other: float):
    shorter, longer = sorted((one, other))
    assert elapsed(shorter, timeout) <= elapsed(longer, timeout)


@pytest.mark.parametrize(
    ("waited", "left"),
    [(0, 300), (100, 200), (296, 4), (297, 3), (310, 3), (597, 3), (599, 1), (600, 0), (HUGE, 0)],
)
def test_passed_timeout_leaves_the_reconnect_grace(waited: float, left: float):
    assert RECONNECT_GRACE == 3
    assert 300 - elapsed(waited, 300) == left


# ---------------------------------------------------------------------- barriers


def patient(world_size: int) -> World:
    """A world whose ranks are not lost, however long they are away."""
    return World(world_size, ttl=100_000)


def deadline(world: World) -> float:
    return some(world.group().open).deadline


def down_for(world: World, seconds: float, *clients: Client) -> None:
    """The coordinator is killed, and after so long these find the next one."""
    world.crash()
    world.now += seconds
    for client in clients:
        client.connect()


def test_deadline_is_the_same_with_the_next_coordinator():
    world = patient(2)
    zero, _ = world.ranks()
    begin = world.now
    zero.arrive()
    world.wait(100)
    down_for(world, 20, zero)
    assert deadline(world) == begin + TIMEOUT
    world.wait(TIMEOUT)
    decision = zero.last
    assert (decision.outcome, decision.wait) == (Outcome.TIMED_OUT, TIMEOUT)
    assert "timed out after 300 s" in decision.message
    assert [one.rank for one in decision.missing] == [1]
    world.assert_good()


def test_later_one_that_has_waited_for_longer_moves_it_earlier():
    world = patient(3)
    zero, one, _ = world.ranks()
    begin = world.now
    zero.arrive()
    world.wait(100)
    one.arrive()
    down_for(world, 5, one)
    assert deadline(world) == begin + 100 + TIMEOUT
    zero.connect()
    assert deadline(world) == begin + TIMEOUT
    world.wait(TIMEOUT - 105)
    assert zero.outcomes == one.outcomes == [Outcome.TIMED_OUT]


def test_timeout_of_the_earliest_counts_unless_it_is_over_later():
    world = patient(3)
    zero, one, _ = world.ranks()
    zero.arrive(timeout=60)
    world.wait(10)
    one.arrive(timeout=300)
    down_for(world, 0, one, zero)
    assert deadline(world) == world.now + 50
    world.wait(50)
    assert "timed out after 60 s" in zero.last.message

    world = patient(3)
    zero, one, _ = world.ranks()
    zero.arrive(timeout=300)
    world.wait(10)
    one.arrive(timeout=60)
    down_for(world, 0, one)
    before = deadline(world)
    zero.connect()
    assert deadline(world) == before == world.now + 60
    assert some(world.group().open).timeout == 60


def test_report_names_all_ranks_that_waited_through_the_deadline():
    """Everyone had arrived, the last one while no coordinator was there."""
    world = patient(2)
    zero, one = world.ranks()
    zero.arrive()
    world.wait(TIMEOUT - 5)
    down_for(world, 15, zero)
    world.wait(RECONNECT_GRACE - 0.1)
    one.connect()
    assert some(one.arrive()).outcome is Outcome.RELEASED

    zero.arrive()
    world.wait(TIMEOUT - 5)
    down_for(world, 15, zero)
    world.wait(RECONNECT_GRACE)
    assert zero.last.outcome is Outcome.TIMED_OUT


def test_reported_wait_covers_earlier_coordinators():
    world = patient(3)
    zero, one, two = world.ranks()
    zero.arrive()
    world.wait(10)
    two.arrive()
    world.wait(20)
    down_for(world, 5, two, zero)
    world.wait(5)
    stands = world.group().progress(some(world.group().open), world.instant)
    assert 'barrier "checkpoint" #0 of run job1 has waited 40 s' in stands.message
    one.connect()
    decision = some(one.arrive())
    assert (decision.wait, decision.skew, decision.last_arrival_rank) == (40, 40, 1)


def test_straggler_is_known_though_it_came_back_first():
    world = patient(3)
    zero, one, two = world.ranks()
    zero.arrive()
    world.wait(10)
    one.arrive()
    world.wait(5)
    two.stream_breaks()
    world.crash()
    one.connect()
    zero.connect()
    two.connect()
    barrier = some(world.group().open)
    assert (barrier.last_arrival_rank, barrier.last_arrival_at - barrier.opened_at) == (1, 10)


def test_arrival_that_is_sent_twice_to_one_coordinator_changes_nothing():
    world = patient(2)
    zero, _ = world.ranks()
    zero.arrive()
    world.wait(1)
    before = deadline(world)
    session = some(zero.session)
    for waited in (0.5, 7.0, HUGE):
        world.do(Arrive(session, CKPT, 0, TIMEOUT, (Arrival(0),), 0.0, waited))
        assert deadline(world) == before


def test_absurd_wait_ends_only_its_barrier():
    world = patient(2)
    zero, one = world.ranks()
    zero.memberships[CKPT].waiting = True
    world.do(Arrive(some(zero.session), CKPT, 0, TIMEOUT, (Arrival(0),), 0.0, HUGE))
    world.tick()
    assert (zero.last.outcome, zero.last.wait) == (Outcome.TIMED_OUT, TIMEOUT)
    one.arrive()
    assert one.outcomes == [Outcome.TIMED_OUT]


def progress(client: Client) -> list[Progress]:
    return client.memberships[CKPT].progress


def test_warning_comes_when_it_would_have_come():
    world = patient(2)
    zero, _ = world.ranks()
    begin = world.now
    zero.arrive()
    world.wait(TIMEOUT / 2 - 50)
    down_for(world, 20, zero)
    assert some(world.group().open).progress_at == begin + TIMEOUT / 2
    world.wait(30)
    assert len(progress(zero)) == 1


def test_due_warning_waits_for_the_reconnect_grace():
    world = patient(3)
    zero, one, two = world.ranks()
    zero.arrive(progress_after=1.0)
    one.arrive(progress_after=1.0)
    down_for(world, 160, zero)
    world.wait(RECONNECT_GRACE - 0.5)
    one.connect()
    two.connect()
    assert not progress(zero)
    world.wait(RECONNECT_GRACE)
    (barrier,) = progress(zero)
    assert [missing.rank for missing in barrier.missing] == [2]
    world.wait(TIMEOUT)
    assert len(progress(zero)) == 1, "half of the timeout is over"


def test_no_warning_comes_when_the_end_is_near():
    world = patient(2)
    zero, _ = world.ranks()
    zero.arrive()
    down_for(world, TIMEOUT - 1, zero)
    assert some(world.group().open).progress_at is None
    world.wait(RECONNECT_GRACE)
    assert (zero.outcomes, progress(zero)) == ([Outcome.TIMED_OUT], [])


uptimes = st.lists(st.tuples(st.floats(0.01, 40), st.floats(0, 20), st.booleans()), min_size=1, max_size=30)
"""How long a coordinator lived, how long none was there, and which rank came back first."""


@settings(deadline=None)
@given(uptimes=uptimes, timeout=st.floats(0.5, 60), between=st.floats(0, 30))
def test_wait_ends_although_coordinators_are_killed_repeatedly(
    uptimes: list[tuple[float, float, bool]], timeout: float, between: float
):
    """At the timeout, if a coordinator is there for a moment then; within twice the timeout in any case."""
    world = patient(3)
    zero, one, _ = world.ranks()
    begin = world.now
    zero.arrive(timeout=timeout)
    world.wait(min(between, timeout / 2))
    one.arrive(timeout=timeout)
    longest_absence = 0.0
    for lived, absent, backwards in uptimes:
        last = float("inf")
        for client in (one, zero) if backwards else (zero, one):
            if client.session is None:
                client.connect()
            if (barrier := world.group().open) is not None:
                assert world.now <= barrier.deadline <= last, "it is never over, and never moves to later"
                last = barrier.deadline
        world.wait(lived)
        if zero.outcomes:
            break
        in_time = begin + timeout + longest_absence + min(RECONNECT_GRACE, timeout)
        assert lived < RECONNECT_GRACE or world.now <= in_time + 1e-6, "it lives on beyond its timeout"
        assert world.now <= begin + 2 * timeout + longest_absence + 1e-6, "nothing ends it"
        world.crash()
        world.now += absent
        longest_absence = max(longest_absence, absent)
    else:
        for client in (zero, one):
            client.connect()
        world.wait(timeout)
    assert zero.outcomes == one.outcomes[: len(zero.outcomes)] == [Outcome.TIMED_OUT]
    assert [missing.rank for missing in zero.last.missing if missing.state is MissingState.NEVER_JOINED] == []
    assert zero.last.wait <= timeout + 1e-6
    world.assert_good()


# ---------------------------------------------------------------------- joins


def test_join_timeout_is_counted_on_by_the_next_coordinator():
    world = RendezvousWorld(nodes(2))
    one = world.agent("node-0")
    begin = world.now
    world.wait(JOIN - 100)
    world.crash()
    world.now += 20
    one.connect()
    (node,) = world.rendezvous.of(NodeStanding.PARTICIPANT)
    assert node.joined_at == begin
    world.wait(79)
    assert one.refusal is None
    world.wait(1)
    assert one.reason is Reason.RENDEZVOUS_TIMED_OUT
    assert "10 min" in some(one.refusal).message or "600 s" in some(one.refusal).message


def test_round_that_comes_together_again_after_its_time_is_completed():
    world = RendezvousWorld(nodes(2))
    one = world.agent("node-0")
    world.wait(JOIN - 5)
    world.crash()
    world.now += 15
    one.connect()
    world.wait(RECONNECT_GRACE - 0.5)
    two = world.agent("node-1")
    assert {one.rank, two.rank} == {0, 1}
    assert world.completed[-1].join_seconds <= JOIN


def test_join_ends_though_the_coordinator_is_killed_again_and_again():
    world = RendezvousWorld(nodes(2))
    one = world.agent("node-0")
    begin = world.now
    while one.refusal is None:
        world.wait(40)
        if one.refusal is None:
            world.crash()
            world.now += 5
            one.connect()
        assert world.now <= begin + JOIN + 45
    assert one.reason is Reason.RENDEZVOUS_TIMED_OUT


def test_time_of_a_place_is_not_the_time_of_a_wait():
    """Neither a node of the complete round, nor one that stands by, has waited for a round."""
    world = RendezvousWorld(nodes(1, 2))
    one, two, spare = world.several("node-0", "node-1", "node-2")
    assert (one.rank is not None, two.rank is not None, spare.stands) == (True, True, NodeStanding.REDUNDANT)
    world.wait(10 * JOIN)
    world.crash()
    for agent in (one, two, spare):
        agent.connect()
    assert [agent.ask().waited for agent in (one, two, spare)] == [0, 0, 0]
    world.wait(10 * JOIN)
    assert (one.refusal, two.refusal, spare.refusal) == (None, None, None)


def test_join_of_a_nonsense_length_is_over_at_once():
    world = RendezvousWorld(nodes(2))
    one = world.agent("node-0", join=False)
    one.attempt = 1
    one.session = world.open_node_session(one)
    world.do(one.ask(waited=HUGE))
    world.tick()
    assert one.reason is Reason.RENDEZVOUS_TIMED_OUT


def test_wait_restarts_for_a_rank_that_does_not_report_it():
    world = patient(2)
    zero, _ = world.ranks()
    answers = world.ask(Arrive(some(zero.session), CKPT, 0, TIMEOUT, (Arrival(0),)))
    assert not [one for one in answers if isinstance(one, Refused)]
    assert deadline(world) == world.now + TIMEOUT
    assert world.coordinator.runs[RUN].groups[CKPT].open is not None
