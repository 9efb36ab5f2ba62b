"""Invariant 15 (every bound is a named limit): the answer names it, and what is there goes on."""

from contextlib import contextmanager

import pytest

from muster.service.core.vocabulary.effects import Refused
from muster.service.core.vocabulary.events import Arrival, Arrive, Forget, Hello, JoinGroup, ProcessInfo
from muster.service.core.vocabulary.limits import SMALL_GATHER_BYTES, Limits
from muster.service.core.vocabulary.model import Decision, Outcome
from muster.service.core.vocabulary.refusal import Reason
from tests.support.expect import some
from tests.support.world.core_client import CKPT, TIMEOUT
from tests.support.world.core_world import RUN, TTL, World


@contextmanager
def a_barrier_that_goes_on(**limits):
    """Two ranks under these limits; whatever is refused in between, their barrier completes."""
    world = World(2, limits=Limits(**limits))
    zero, one = world.ranks()
    yield world
    zero.arrive()
    assert some(one.arrive()).outcome is Outcome.RELEASED
    world.assert_good()


def assert_limited(refused, limit, value, *words):
    assert refused.refusal.reason is Reason.LIMIT_EXCEEDED
    assert refused.refusal.metadata == {"limit": limit, "value": str(value)}
    for word in (*words, f"the limit {limit} is {value:,}", f"raise {limit} on the coordinator"):
        assert word in refused.refusal.message


def gathering(world, run, payload):
    """A rank of another run waits at a barrier with its payload."""
    world.start(0, run=run).arrive(payload=payload)


def a_hello(world, run=RUN, rank=0):
    return Hello(world.new_session(), run, 0, (ProcessInfo(rank, f"p{world.count()}", "node-9", 1),))


def test_runs_are_bounded():
    with a_barrier_that_goes_on(max_runs=1) as world:
        assert_limited(world.refused(a_hello(world, "job2")), "max_runs", 1, "1 runs are known")
        assert list(world.coordinator.runs) == [RUN]


def test_sessions_are_bounded():
    with a_barrier_that_goes_on(max_sessions=2) as world:
        assert_limited(world.refused(a_hello(world)), "max_sessions", 2, "2 sessions are open")
        world.clients[0].reconnect()


def test_groups_are_bounded():
    with a_barrier_that_goes_on(max_groups_per_run=2) as world:
        zero = world.clients[0]
        zero.join("second")
        refused = world.refused(JoinGroup(zero.session, "third", 2))
        assert_limited(refused, "max_groups_per_run", 2, '"third" would be one more')
        assert zero.join("second") == 0


def test_living_processes_of_one_rank_are_bounded():
    with a_barrier_that_goes_on(max_processes_per_rank=2) as world:
        world.start(0)
        refused = world.refused(a_hello(world))
        assert_limited(refused, "max_processes_per_rank", 2, "speak for rank 0")
        assert refused.final
        world.clients[0].reconnect()


def test_dead_process_makes_room_for_a_restarted_one():
    world = World(2, limits=Limits(max_processes_per_rank=2))
    for _ in range(10):
        world.start(0).die()
        world.wait(TTL)
    assert world.start(0).refusals == []
    assert len(world.coordinator.runs[RUN].roster.of_rank(0)) <= 2


def test_new_generation_has_room_whatever_the_old_one_used():
    world = World(2, limits=Limits(max_processes_per_rank=1))
    world.start(0)
    assert world.start(0, generation=1).refusals == []


def test_too_large_payload_is_refused():
    with a_barrier_that_goes_on(max_payload_bytes=1_000) as world:
        event = Arrive(world.clients[0].session, CKPT, 0, TIMEOUT, (Arrival(0, b"x" * 1_001),))
        assert_limited(world.refused(event), "max_payload_bytes", 1_000, "1,001 bytes", '"checkpoint" #0')


def test_refused_payload_opens_no_barrier_and_sets_no_deadline():
    with a_barrier_that_goes_on(max_payload_bytes=10) as world:
        event = Arrive(world.clients[0].session, CKPT, 0, 0.5, (Arrival(0, b"x" * 11),))
        world.refused(event)
        assert world.group().open is None
        assert world.group().owners[0].last is None
        assert world.coordinator.next_deadline() is None


def test_payloads_of_one_barrier_are_bounded():
    world = World(3, limits=Limits(max_gather_bytes=25))
    zero, one, two = world.ranks()
    zero.arrive(payload=b"x" * 10)
    one.arrive(payload=b"x" * 10)
    two.arrive(payload=b"x" * 10)
    for client in (zero, one, two):
        assert client.outcomes == [Outcome.ABORTED]
        assert "come to 30 bytes with those of 3 of 3 ranks" in client.last.message
        assert "the limit max_gather_bytes is 25" in client.last.message
    for client in (zero, one, two):
        client.arrive(payload=b"x" * 5)
    assert zero.outcomes == [Outcome.ABORTED, Outcome.RELEASED]
    world.assert_good()


def test_payload_beyond_the_total_aborts_its_barrier_for_all_ranks():
    world = World(3, limits=Limits(max_total_gather_bytes=25))
    gathering(world, "other", b"x" * 20)
    zero, one, two = world.ranks()
    zero.arrive(payload=b"x" * 5)
    one.arrive(payload=b"x")
    assert some(two.arrive(payload=b"x")).missing[0].rank == 2
    for client in (zero, one, two):
        assert client.refusals == []
        assert client.outcomes == [Outcome.ABORTED]
        assert "the payloads of all runs come to 26 bytes" in client.last.message
        assert "the limit max_total_gather_bytes is 25" in client.last.message
        assert "raise max_total_gather_bytes on the coordinator" in client.last.message
    assert world.coordinator.gathered.bytes == 20
    # All ranks are at the next barrier, which has room for as much as the failed one freed.
    for client in (zero, one, two):
        client.arrive(payload=b"x")
    assert zero.outcomes == [Outcome.ABORTED, Outcome.RELEASED]
    world.assert_good()


def test_large_payloads_leave_the_last_eighth_of_the_total_to_small_ones():
    large = SMALL_GATHER_BYTES + 1
    world = World(1, limits=Limits(max_total_gather_bytes=4 * large, max_gather_bytes=4 * large))
    gathering(world, "other", b"x" * 3 * large)
    (zero,) = world.ranks()
    zero.arrive(payload=b"x" * large)
    assert zero.outcomes == [Outcome.ABORTED]
    assert f"the last eighth is for barriers with {SMALL_GATHER_BYTES:,} bytes at most" in zero.last.message
    zero.arrive(payload=b"x" * SMALL_GATHER_BYTES)
    assert zero.outcomes == [Outcome.ABORTED, Outcome.RELEASED]
    world.assert_good()


def test_arrivals_without_payload_and_votes_go_on_beyond_the_total():
    world = World(2, limits=Limits(max_total_gather_bytes=20))
    gathering(world, "other", b"x" * 20)
    zero, one = world.ranks()
    zero.arrive()
    one.arrive()
    zero.arrive()
    one.arrive(payload=b"x", failure="disk full")
    assert zero.outcomes == [Outcome.RELEASED, Outcome.ABORTED]
    assert "disk full" in zero.last.message
    assert world.coordinator.gathered.bytes == 20
    world.assert_good()


def test_repeated_arrival_needs_no_more_room_in_the_total():
    world = World(2, limits=Limits(max_total_gather_bytes=20))
    zero, one = world.ranks()
    zero.arrive(payload=b"x" * 20)
    zero.arrive_again()
    zero.reconnect()
    assert world.coordinator.gathered.bytes == 20
    assert some(one.arrive()).payloads == ((0, b"x" * 20),)


def test_payloads_leave_the_total_with_their_arrival_barrier_decision_and_run():
    world = World(2)
    total = world.coordinator.gathered
    zero, one = world.ranks()
    zero.arrive(payload=b"x" * 3)
    assert total.bytes == 3
    newer = world.start(0)
    newer.join()
    assert total.bytes == 0, "a newer process takes the rank over"
    newer.arrive(payload=b"x" * 4)
    world.wait(TIMEOUT)
    assert total.bytes == 0, "the barrier timed out"
    one.arrive()
    newer.arrive(payload=b"x" * 5)
    one.arrive(payload=b"x" * 6)
    assert total.bytes == 11, "the release is kept for ranks that ask again"
    newer.arrive(payload=b"x")
    assert total.bytes == 12
    one.arrive()
    assert total.bytes == 1, "the next release ends that"
    newer.arrive(payload=b"x" * 2)
    world.do(Forget(world.new_session(), RUN, force=True))
    assert total.bytes == 0, "the run is forgotten"


def test_restored_payloads_beyond_the_total_stay_and_only_new_ones_are_refused():
    world = World(2)
    zero, one = world.ranks()
    zero.arrive(payload=b"x" * 5)
    one.arrive(payload=b"x" * 6)
    world.limits = Limits(max_total_gather_bytes=10)
    world.crash()
    assert world.coordinator.gathered.bytes == 11
    assert dict(world.group().decisions[0].payloads) == {0: b"x" * 5, 1: b"x" * 6}
    zero.connect()
    one.connect()
    zero.arrive(payload=b"x")
    one.arrive()
    assert one.outcomes == [Outcome.RELEASED, Outcome.ABORTED]
    zero.arrive()
    one.arrive()
    assert one.last.outcome is Outcome.RELEASED
    assert world.coordinator.gathered.bytes == 0
    world.assert_good()


def test_decisions_that_ranks_must_still_hear_are_bounded():
    world = World(2, limits=Limits(max_unheard_decisions=3))
    zero = world.start(0)
    failed = [zero.arrive(failure="no") for _ in range(3)]
    event = Arrive(some(zero.session), CKPT, 3, TIMEOUT, (Arrival(0),))
    assert_limited(world.refused(event), "max_unheard_decisions", 3, "3 decisions in a row without a release")
    assert world.group().open is None
    late = world.start(1)
    assert [late.arrive() for _ in failed] == failed


@pytest.mark.parametrize("restarts", [False, True])
def test_group_goes_on_when_every_rank_heard_each_of_many_failures(restarts):
    world = World(3, limits=Limits(max_unheard_decisions=20))
    clients = world.ranks()
    for sequence in range(100):
        clients[sequence % 3].arrive(failure="no")
        for client in clients:
            if client is not clients[sequence % 3]:
                assert some(client.arrive()).outcome is Outcome.ABORTED
        if restarts and sequence % 7 == 0:
            world.crash()
            for client in clients:
                client.connect()
    assert [client.refusals for client in clients] == [[]] * 3
    assert len(world.disk.of_kind(Decision)) <= 20
    for client in clients:
        client.arrive()
    assert [client.last.outcome for client in clients] == [Outcome.RELEASED] * 3


def test_rank_that_missed_failures_counts_towards_their_bound():
    world = World(3, limits=Limits(max_unheard_decisions=20))
    zero, one = (world.start(rank) for rank in range(2))
    for _ in range(20):
        zero.arrive(failure="no")
        one.arrive()
    for client in (zero, one):
        event = Arrive(some(client.session), CKPT, 20, TIMEOUT, (Arrival(client.rank),))
        assert_limited(world.refused(event), "max_unheard_decisions", 20, "20 decisions in a row")
    late = world.start(2)
    for _ in range(20):
        assert some(late.arrive()).outcome is Outcome.ABORTED
    for client in (late, zero, one):
        client.arrive()
    assert one.last.outcome is Outcome.RELEASED
    world.assert_good()


def test_rank_outside_the_shape_starts_after_the_heard_failures():
    world = World(2, limits=Limits(max_unheard_decisions=4))
    clients = world.ranks()
    for _ in range(10):
        clients[0].arrive(failure="no")
        clients[1].arrive()
    stranger = world.start(2)
    stranger.join(world_size=3)
    assert stranger.memberships[CKPT].position == min(world.group().decisions) > 0


def test_new_generation_goes_on_after_too_many_failures():
    world = World(2, limits=Limits(max_unheard_decisions=2))
    zero = world.start(0)
    for _ in range(2):
        zero.arrive(failure="no")
    new = [world.start(rank, generation=1) for rank in range(2)]
    for client in new:
        client.arrive()
    assert new[0].last.sequence == 2
    assert new[0].outcomes == [Outcome.RELEASED]


@pytest.mark.parametrize("restart", [False, True])
def test_history_of_a_group_is_bounded_in_memory_and_on_disk(restart):
    world = World(2, limits=Limits(decision_history=5))
    zero, one = world.ranks()
    for _ in range(30):
        zero.arrive()
        one.arrive()
        if restart:
            world.crash()
            zero.connect()
            one.connect()
    decisions = world.group().decisions
    assert list(decisions) == list(range(30))[-len(decisions) :]
    assert len(decisions) <= 6
    assert len(world.disk.kept) == len(decisions) + 4, "a run, a group and two speakers beside them"
    refused = world.refused(Arrive(some(zero.session), CKPT, 2, TIMEOUT, (Arrival(0),)))
    assert refused.refusal.reason is Reason.SEQUENCE_FORGOTTEN
    world.assert_good()


def test_next_sequence_is_known_without_any_history():
    world = World(2, limits=Limits(decision_history=0))
    zero, one = world.ranks()
    for sequence in range(5):
        zero.arrive()
        assert some(one.arrive()).sequence == sequence
        world.crash()
        zero.connect()
        one.connect()
    assert len(world.group().decisions) <= 2
    world.assert_good()


def test_unheard_decision_is_kept_beyond_the_history():
    world = World(2, limits=Limits(decision_history=2))
    zero = world.start(0)
    failed = [zero.arrive(failure="no") for _ in range(20)]
    late = world.start(1)
    assert [late.arrive() for _ in failed] == failed
    world.assert_good()


def test_fewer_large_decisions_are_kept():
    world = World(20, limits=Limits(max_kept_missing=400))
    zero = world.start(0)
    for _ in range(20):
        zero.arrive(failure="no")
    event = Arrive(some(zero.session), CKPT, 20, TIMEOUT, (Arrival(0),))
    assert_limited(world.refused(event), "max_unheard_decisions", 20, "20 decisions in a row")
    assert Limits().history(4) == Limits().decision_history
    assert Limits().history(65_536) == Limits().unheard_decisions(65_536) == 16


def test_session_that_replaces_its_own_needs_no_more_room():
    with a_barrier_that_goes_on(max_sessions=2) as world:
        zero = world.clients[0]
        world.streams.pop(zero.session)
        zero.session = None  # The coordinator has not seen the old stream break.
        zero.connect()
        assert zero.refusals == []


@pytest.mark.parametrize(
    ("field", "event"),
    [
        ("ranks", lambda session: JoinGroup(session, CKPT, 2, ranks=(0,) * 2)),
        ("participants", lambda session: JoinGroup(session, CKPT, 2, (0,) * 65_537)),
        ("arrivals", lambda session: Arrive(session, CKPT, 0, TIMEOUT, (Arrival(0),) * 2)),
    ],
)
def test_message_names_no_more_ranks_than_a_world_may_have(field, event):
    with a_barrier_that_goes_on() as world:
        refused = world.refused(event(world.clients[0].session)).refusal
        assert refused.reason is Reason.INVALID_ARGUMENT
        assert refused.metadata == {"field": field}


def test_ended_call_does_not_count_as_a_process():
    world = World(2, limits=Limits(max_processes_per_rank=2))
    for call in range(5):
        process = ProcessInfo(0, f"call-{call}", "laptop", 1)
        event = world.arrive_once(0, process=process)
        assert not any(isinstance(answer, Refused) for answer in world.ask(event))
        world.hang_up(event.session)
