"""The invariants of barriers and membership in docs/design.md, one heading for each."""

import pytest

from muster.service.core.membership.process import SUCCESSION_WINDOW
from muster.service.core.vocabulary.effects import GroupJoined, Refused
from muster.service.core.vocabulary.events import Abort, Arrival, Arrive, Hello, JoinGroup, ProcessInfo
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import Decision, MissingState, Outcome
from muster.service.core.vocabulary.refusal import Reason
from tests.support.expect import of_kind, some
from tests.support.world.core_client import CKPT, TIMEOUT
from tests.support.world.core_disk import Crash
from tests.support.world.core_world import RUN, TTL, World


@pytest.fixture
def world():
    """Two ranks, and at the end the judgement of all that they heard."""
    world = World(2)
    yield world
    world.assert_good()


# ---------------------------------------- invariant 1 (one decision per barrier)


def test_a_barrier_is_released_when_every_rank_has_arrived(world):
    zero, one = world.ranks()
    assert zero.arrive() is None
    world.now += 2.5
    decision = one.arrive()
    assert decision is zero.last
    assert (decision.outcome, decision.arrived, decision.required) == (Outcome.RELEASED, 2, 2)
    assert (decision.wait, decision.skew, decision.last_arrival_rank) == (2.5, 2.5, 1)
    assert decision.message == (
        'barrier "checkpoint" #0 of run job1 was released: 2 of 2 arrived in 2.5 s, rank 1 last'
    )


def test_one_decision_is_made_once_and_delivered_to_all_in_one_message(world):
    zero, one = world.ranks()
    zero.arrive()
    one.arrive()
    ((sessions, _),) = world.last.deliveries
    assert sorted(sessions) == [zero.session, one.session]
    assert len(world.last.decisions) == 1


def test_no_rank_is_released_from_a_barrier_that_another_has_seen_fail(world):
    zero, one = world.ranks()
    zero.arrive()
    world.wait(TIMEOUT)
    assert zero.last.outcome is Outcome.TIMED_OUT
    assert one.arrive() == zero.last


def test_a_late_rank_gets_the_stored_outcome(world):
    zero, one = world.ranks()
    zero.arrive()
    world.wait(TIMEOUT)
    world.wait(10_000)
    late = one.arrive()
    assert late == zero.last
    assert world.last.records == []


def test_a_rank_that_lost_its_stream_hears_the_one_decision_when_it_is_back(world):
    zero, one = world.ranks()
    zero.arrive()
    zero.stream_breaks()
    one.arrive()
    assert zero.outcomes == []
    zero.connect()
    assert zero.last == one.last


def test_groups_are_independent_of_each_other(world):
    zero, one = world.ranks()
    zero.arrive(CKPT)
    one.arrive("eval")
    assert zero.arrive("eval").outcome is Outcome.RELEASED
    assert world.group(CKPT).open is not None


def test_runs_are_independent_of_each_other(world):
    zero = world.start(0, run="job1")
    other = world.start(1, run="job2")
    zero.arrive()
    other.arrive()
    assert zero.outcomes == other.outcomes == []


def test_a_world_of_one_is_released_at_once(world):
    alone = world.start(0)
    alone.join(world_size=1)
    assert alone.arrive().outcome is Outcome.RELEASED


# ---------------------------------------- invariant 2 (durable before delivered)


def test_durable_before_told_the_decision_is_among_the_records_of_its_step(world):
    zero, one = world.ranks()
    zero.arrive()
    decision = one.arrive()
    assert decision in world.last.records


def test_durable_before_told_a_crash_before_the_disk_is_as_if_the_last_arrival_was_never_sent(world):
    zero, one = world.ranks()
    zero.arrive()
    world.crash_next = Crash.BEFORE_PERSIST
    one.arrive()
    assert world.disk.decided == {}
    zero.connect()
    assert zero.outcomes == []
    one.connect()
    assert zero.outcomes == one.outcomes == [Outcome.RELEASED]


def test_durable_before_told_a_crash_after_the_disk_gives_everyone_the_same_answer(world):
    zero, one = world.ranks()
    zero.arrive()
    world.crash_next = Crash.AFTER_PERSIST
    one.arrive(failure="disk full")
    assert zero.outcomes == one.outcomes == []
    one.connect()
    zero.connect()
    assert zero.last == one.last
    assert zero.last.outcome is Outcome.ABORTED


def test_durable_before_told_a_timeout_that_was_not_told_is_told_after_the_restart(world):
    zero, one = world.ranks()
    zero.arrive()
    world.now += TIMEOUT
    world.crash_next = Crash.AFTER_PERSIST
    world.tick()
    one.connect()
    assert one.arrive().outcome is Outcome.TIMED_OUT
    zero.connect()
    assert zero.last == one.last


# ---------------------------------------- invariant 3 (repeated arrivals count once)


def test_arriving_twice_counts_once(world):
    zero, one = world.ranks()
    zero.arrive()
    zero.arrive_again()
    zero.arrive_again()
    assert zero.outcomes == []
    assert one.arrive().arrived == 2


def test_arriving_twice_keeps_the_first_payload_and_counts_it_once(world):
    zero, one = world.ranks()
    zero.arrive(payload=b"first")
    zero.arrive(payload=b"second")
    one.arrive()
    assert one.last.payloads == ((0, b"first"),)


def test_arriving_again_after_a_lost_connection_is_safe(world):
    zero, one = world.ranks()
    zero.arrive()
    zero.reconnect()
    zero.reconnect()
    assert one.arrive().outcome is Outcome.RELEASED
    assert zero.outcomes == [Outcome.RELEASED]


def test_arriving_again_after_the_decision_gets_the_decision_again(world):
    zero, one = world.ranks()
    zero.arrive()
    one.arrive()
    answers = world.ask(Arrive(zero.session, CKPT, 0, TIMEOUT, (Arrival(0),)))
    assert answers == [zero.last]


def test_arriving_twice_does_not_move_the_deadline(world):
    zero, _ = world.ranks()
    zero.arrive()
    world.wait(TIMEOUT - 1)
    zero.arrive_again()
    world.wait(1)
    assert zero.outcomes == [Outcome.TIMED_OUT]


# ---------------------------------------- invariant 4 (ranks stay in step after a failure)


@pytest.mark.parametrize("failures", [1, 3])
def test_ranks_stay_in_step_after_a_failure(world, failures):
    zero, one = world.ranks()
    for _ in range(failures):
        zero.arrive()
        world.wait(TIMEOUT)
    for _ in range(failures):
        assert one.arrive().outcome is Outcome.TIMED_OUT
    one.arrive()
    decision = zero.arrive()
    assert (decision.outcome, decision.sequence) == (Outcome.RELEASED, failures)
    assert one.last == decision


def test_a_decided_sequence_is_over_whatever_its_outcome(world):
    zero, one = world.ranks()
    zero.arrive(failure="disk full")
    assert world.group().next_sequence == 1
    assert one.arrive().outcome is Outcome.ABORTED
    assert world.group().open is None


def test_a_missing_rank_that_comes_late_is_answered_at_once_for_each_sequence_it_missed(world):
    zero, one = world.ranks()
    heard = []
    for failure in ("first", "second"):
        heard.append(zero.arrive(failure=failure))
    assert [one.arrive(), one.arrive()] == heard


# ---------------------------------------- invariant 5 (every rank learns all missing ranks)


def test_the_missing_are_named_to_everyone_with_host_pid_and_why():
    world = World(6)
    zero, one, two, three, four = world.ranks(5)
    for client in (zero, one, two, three, four):
        client.arrive(failure="start over") if client is zero else client.arrive()
    zero.arrive()
    one.arrive()
    three.goodbye()
    assert zero.last == one.last
    missing = {m.rank: m for m in one.last.missing}
    assert [m.rank for m in one.last.missing] == [2, 3, 4, 5]
    assert (missing[2].state, missing[2].host, missing[2].pid) == (
        MissingState.NOT_ARRIVED,
        two.host,
        two.pid,
    )
    assert missing[2].last_sequence == 0
    assert missing[3].state is MissingState.LEFT
    assert missing[4].state is MissingState.NOT_ARRIVED
    assert missing[5].state is MissingState.NEVER_JOINED
    assert "rank 2 (node-0, pid" in one.last.message
    assert "rank 5 (never joined)" in one.last.message
    world.assert_good()


def test_the_missing_are_named_with_how_long_the_connection_was_lost(world):
    zero, one = world.ranks()
    zero.arrive()
    world.now += 5
    one.lose_connection()
    world.wait(TTL)
    (missing,) = zero.last.missing
    assert (missing.state, missing.gone_for) == (MissingState.CONNECTION_LOST, TTL)
    assert f"rank 1 (node-0, pid {one.pid}, connection lost 10 s ago)" in zero.last.message


def test_the_missing_are_named_with_the_sequence_that_they_are_still_at(world):
    zero, one = world.ranks()
    zero.arrive()
    one.arrive()
    zero.arrive()
    world.wait(TIMEOUT)
    assert zero.last.missing[0].last_sequence == 0
    assert "connected, still at #0" in zero.last.message


def test_the_missing_are_named_without_a_cap_in_the_data_and_in_ranges_in_the_text():
    world = World(4096)
    alone = world.start(7)
    alone.arrive()
    world.wait(TIMEOUT)
    assert [m.rank for m in alone.last.missing] == [r for r in range(4096) if r != 7]
    assert "arrived 1 of 4096; missing: ranks 0-6, 8-4095 (never joined)" in alone.last.message
    assert len(alone.last.message) < 300


def test_the_missing_are_told_before_if_the_first_arrival_asks_for_it_and_at_half_of_the_timeout(world):
    zero, one = world.ranks()
    zero.arrive(timeout=100.0, progress_after=10.0)
    told = zero.seats[CKPT].progress
    world.wait(9.0)
    assert told == []
    world.wait(1.0)
    assert [progress.message.partition(":")[0] for progress in told] == [
        'barrier "checkpoint" #0 of run job1 has waited 10 s'
    ]
    world.wait(89.0)
    assert len(told) == 2
    assert "has waited 50 s" in told[1].message
    assert one.arrive().outcome is Outcome.RELEASED


@pytest.mark.parametrize("after", [0.0, 50.0, 60.0, 1e9])
def test_the_missing_are_told_at_half_of_the_timeout_at_the_latest(world, after):
    zero, _ = world.ranks()
    zero.arrive(timeout=100.0, progress_after=after)
    world.wait(49.0)
    assert zero.seats[CKPT].progress == []
    world.wait(50.0)
    assert len(zero.seats[CKPT].progress) == 1


def test_the_missing_are_told_at_half_of_the_timeout_to_those_who_wait_and_only_once(world):
    zero, one = world.ranks()
    zero.arrive(timeout=100)
    world.wait(49)
    assert zero.seats[CKPT].progress == []
    world.wait(50)
    (progress,) = zero.seats[CKPT].progress
    assert (progress.arrived, progress.required) == (1, 2)
    assert [m.rank for m in progress.missing] == [1]
    assert 'barrier "checkpoint" #0 of run job1 has waited 50 s: arrived 1 of 2' in progress.message
    assert one.seats[CKPT].progress == []


def test_the_missing_rank_is_the_one_to_look_at_next(world):
    zero, _ = world.ranks()
    zero.arrive()
    world.wait(TIMEOUT)
    assert zero.last.message.endswith("\n  next: muster describe member job1 1")


# ---------------------------------------- invariant 6 (a barrier does not wait for the dead)


def test_the_dead_are_not_waited_for_longer_than_the_session_ttl(world):
    zero, one = world.ranks()
    zero.arrive()
    one.die()
    world.wait(TTL - 0.1)
    assert zero.outcomes == []
    world.wait(0.1)
    assert zero.outcomes == [Outcome.MEMBER_LOST]


def test_the_dead_are_given_the_whole_ttl_from_the_last_time_that_they_were_there(world):
    zero, one = world.ranks()
    zero.arrive()
    one.reconnect()
    world.wait(TTL / 2)
    one.die()
    world.wait(TTL - 0.1)
    assert zero.outcomes == []
    world.wait(0.1)
    assert zero.outcomes == [Outcome.MEMBER_LOST]


def test_the_dead_who_come_back_within_the_ttl_are_not_lost(world):
    zero, one = world.ranks()
    zero.arrive()
    for _ in range(5):
        one.lose_connection()
        world.wait(TTL - 1)
        one.connect()
    assert one.arrive().outcome is Outcome.RELEASED


def test_a_goodbye_counts_at_once(world):
    zero, one = world.ranks()
    zero.arrive()
    one.goodbye()
    assert zero.outcomes == [Outcome.MEMBER_LOST]


def test_a_barrier_that_needs_one_already_dead_fails_at_its_first_arrival(world):
    zero, one = world.ranks()
    one.goodbye()
    assert zero.arrive().outcome is Outcome.MEMBER_LOST


def test_a_dead_rank_that_had_arrived_is_not_missing(world):
    zero, one = world.ranks()
    zero.arrive()
    zero.die()
    world.wait(2 * TTL)
    assert one.arrive().outcome is Outcome.RELEASED


def test_all_who_died_at_once_are_named_together():
    world = World(4)
    clients = world.ranks()
    clients[0].arrive()
    for client in clients[2:]:
        client.die()
    world.wait(TTL)
    decision = clients[0].last
    assert [m.rank for m in decision.missing if m.state is MissingState.CONNECTION_LOST] == [2, 3]
    assert "lost rank 2 (" in decision.message
    assert "describe member job1 2" in decision.message
    world.assert_good()


def test_the_dead_fail_the_barriers_that_need_them_and_no_others():
    world = World(3)
    zero, one, two = (world.start(rank) for rank in range(3))
    for client in (zero, one):
        client.join(participants=(0, 1))
    two.join("eval")
    zero.join("eval")
    zero.arrive()
    zero.arrive("eval")
    two.goodbye()
    assert zero.seats["eval"].heard[-1].outcome is Outcome.MEMBER_LOST
    assert zero.outcomes == []
    assert some(one.arrive()).outcome is Outcome.RELEASED


def test_a_live_but_stuck_member_is_what_the_timeout_is_for(world):
    zero, _ = world.ranks()
    zero.arrive()
    world.wait(TIMEOUT - 1)
    assert zero.outcomes == []
    world.wait(1)
    assert zero.outcomes == [Outcome.TIMED_OUT]


def test_a_rank_given_up_that_comes_back_late_hears_what_it_missed_and_goes_on(world):
    zero, one = world.ranks()
    zero.arrive()
    one.lose_connection()
    world.wait(TTL)
    one.connect()
    assert one.arrive() == zero.last
    zero.arrive()
    assert one.arrive().outcome is Outcome.RELEASED


def test_a_dead_trainer_is_not_waited_for_even_if_it_never_joined_the_group(world):
    zero = world.start(0)
    zero.arrive()
    world.start(1).goodbye()
    assert zero.outcomes == [Outcome.MEMBER_LOST]


def test_a_rank_lives_as_long_as_one_process_may_still_join_for_it(world):
    zero, one = world.ranks()
    successor = world.start(1)
    zero.arrive()
    one.die()
    world.wait(2 * TTL)
    assert zero.outcomes == []
    successor.goodbye()
    assert zero.outcomes == [Outcome.MEMBER_LOST]


def test_the_end_of_a_unary_call_is_not_a_death():
    world = World(2)
    zero = world.start(0)
    zero.join()
    world.hang_up(world.call(1, sequence=0))
    world.wait(2 * TTL)
    assert some(zero.arrive()).outcome is Outcome.RELEASED
    zero.arrive()
    world.wait(2 * TTL)
    assert zero.outcomes == [Outcome.RELEASED], "it is idle, not dead"
    world.call(1, sequence=1)
    assert zero.outcomes == [Outcome.RELEASED] * 2


# ---------------------------------------- invariant 7 (one failure vote aborts the barrier)


def test_a_vote_is_an_abort_at_once_for_all_with_rank_and_reason():
    world = World(3)
    zero, one, _ = world.ranks()
    zero.arrive()
    decision = one.arrive(failure="OSError: No space left on device")
    assert decision is not None
    assert decision.outcome is Outcome.ABORTED
    assert zero.last == decision
    (failure,) = decision.failures
    assert (failure.rank, failure.host, failure.pid) == (1, one.host, one.pid)
    assert f"rank 1 (node-0, pid {one.pid}) failed: OSError: No space left on device" in decision.message
    world.assert_good()


def test_a_vote_is_an_abort_even_from_the_last_rank_to_arrive(world):
    zero, one = world.ranks()
    zero.arrive()
    assert one.arrive(failure="bad checksum").outcome is Outcome.ABORTED


def test_a_rank_that_has_arrived_may_still_vote(world):
    zero, _ = world.ranks()
    zero.arrive()
    assert zero.arrive(failure="the upload failed after all").outcome is Outcome.ABORTED


def test_an_empty_reason_is_still_a_vote(world):
    zero, _ = world.ranks()
    assert zero.arrive(failure="").outcome is Outcome.ABORTED


def test_a_long_reason_is_cut_and_a_reason_cannot_steer_a_terminal():
    world = World(2, limits=Limits(max_reason_bytes=20))
    zero, one = world.ranks()
    zero.arrive(failure="\x1b[2J" + "ä" * 50_000)
    assert "… (cut at 20 bytes)" in zero.last.failures[0].reason
    assert len(zero.last.message) < 300
    assert "\x1b" not in zero.last.message
    assert one.arrive() == zero.last
    world.assert_good()


# ---------------------------------------- invariant 8 (disagreement fails every rank)


def test_disagreement_on_the_world_size_is_an_error_for_all_and_names_both_values(world):
    zero, one = world.start(0), world.start(1)
    zero.join(world_size=2)
    one.join(world_size=4)
    decision = one.arrive()
    assert decision.outcome is Outcome.MISMATCHED
    assert zero.arrive() == decision
    assert "ranks disagree on the world size" in decision.message
    assert f"rank 1 (node-0, pid {one.pid}) says 4" in decision.message
    assert f"rank 0 (node-0, pid {zero.pid}) says 2" in decision.message


def test_disagreement_on_the_participants_is_an_error_for_all_and_names_both_lists(world):
    zero, one = world.start(0), world.start(1)
    zero.join(world_size=8, participants=(0, 1, 2, 3))
    zero.arrive()
    one.join(world_size=8, participants=(0, 1, 5))
    decision = one.arrive()
    assert zero.last == decision
    assert decision.outcome is Outcome.MISMATCHED
    assert "says 0-3" in decision.message
    assert "says 0-1, 5" in decision.message


def test_naming_all_ranks_is_no_disagreement_with_naming_none(world):
    zero, one = world.start(0), world.start(1)
    zero.join(participants=(1, 0))
    one.join()
    zero.arrive()
    assert one.arrive().outcome is Outcome.RELEASED


def test_a_rank_unknown_to_the_others_is_not_counted_among_the_arrived(world):
    zero, two = world.start(0), world.start(2)
    zero.join(world_size=2)
    two.join(world_size=3)
    zero.arrive()
    two.arrive()
    assert (zero.last.outcome, zero.last.arrived, zero.last.required) == (Outcome.MISMATCHED, 1, 2)
    assert "arrived 1 of 2; missing: rank 1" in zero.last.message


def test_disagreement_binds_the_living_a_dead_speaker_does_not_count(world):
    zero, one = world.start(0), world.start(1)
    three = world.start(3)
    zero.join()
    three.join(world_size=4)
    three.goodbye()
    one.join()
    zero.arrive()
    assert one.arrive().outcome is Outcome.RELEASED


def test_a_group_that_everyone_has_left_takes_its_world_size_anew_and_goes_on(world):
    for client in world.ranks():
        client.goodbye()
    first = [world.start(rank) for rank in range(3)]
    for client in first:
        assert client.join(world_size=3) == 0
    for client in first:
        client.arrive()
    assert [client.outcomes for client in first] == [[Outcome.RELEASED]] * 3
    for client in first:
        client.goodbye()
    again = world.start(0)
    assert again.join(world_size=1) == 1
    assert again.arrive().sequence == 1


def test_a_barrier_left_open_by_all_is_aborted_when_someone_takes_the_group_anew(world):
    zero = world.start(0)
    zero.arrive(timeout=1_000)
    zero.lose_connection()
    world.wait(2 * TTL)
    assert world.group().open is not None
    fresh = world.start(1)
    assert fresh.join() == 1
    (decision,) = world.disk.decided[RUN, CKPT]
    assert decision.outcome is Outcome.ABORTED
    assert f"has left, and rank 1 (node-0, pid {fresh.pid}) takes it anew" in decision.message


def test_a_group_can_be_taken_anew_while_the_run_goes_on_elsewhere(world):
    world.ranks(prefix="train")
    writer = world.start(0)
    writer.arrive()
    writer.die()
    world.wait(TTL)
    newcomer = world.start(1)
    assert newcomer.join() == 1
    (decision,) = world.disk.decided[RUN, CKPT]
    assert decision.outcome is Outcome.ABORTED
    newcomer.arrive()
    assert world.start(0).arrive().outcome is Outcome.RELEASED


def test_a_process_cannot_change_its_own_shape(world):
    zero, _ = world.ranks()
    refused = world.refused(JoinGroup(zero.session, CKPT, 3))
    assert refused.refusal.reason is Reason.SHAPE_CHANGED
    assert "with world size 2 and now says world size 3" in refused.refusal.message


def test_a_restarted_rank_may_correct_its_shape(world):
    zero, one = world.start(0), world.start(1)
    zero.join(world_size=4)
    one.join(world_size=2)
    zero.die()
    fixed = world.start(0)
    fixed.join(world_size=2)
    one.arrive()
    assert fixed.arrive().outcome is Outcome.RELEASED


def test_whoever_opened_the_barrier_with_another_shape_may_be_superseded_within_it(world):
    zero, one = world.start(0), world.start(1)
    zero.join(world_size=4)
    zero.arrive()
    zero.die()
    fixed = world.start(0)
    fixed.join(world_size=2)
    fixed.arrive()
    one.join(world_size=2)
    assert one.arrive().outcome is Outcome.RELEASED


# ---------------------------------------- invariant 9 (one clock decides)


def test_the_first_arrivals_timeout_sets_the_deadline():
    world = World(3)
    zero, one, _ = world.ranks()
    zero.arrive(timeout=50)
    one.arrive(timeout=1)
    world.wait(49)
    assert one.outcomes == []
    world.wait(1)
    assert zero.outcomes == one.outcomes == [Outcome.TIMED_OUT]
    assert "timed out after 50 s" in zero.last.message
    world.assert_good()


def test_the_first_arrivals_timeout_counts_from_the_first_arrival_of_each_barrier(world):
    zero, one = world.ranks()
    zero.arrive(timeout=100)
    world.wait(90)
    one.arrive()
    zero.arrive(timeout=100)
    world.wait(99)
    assert one.arrive().outcome is Outcome.RELEASED


def test_an_early_tick_does_no_harm_and_a_late_one_still_times_out(world):
    zero, _ = world.ranks()
    zero.arrive(timeout=10)
    world.tick(world.now)
    assert zero.outcomes == []
    world.tick(world.now + 1_000)
    assert zero.outcomes == [Outcome.TIMED_OUT]


def test_the_wall_clock_decides_nothing(world):
    zero, one = world.ranks()
    zero.arrive(timeout=10)
    world.wait(9)
    assert one.arrive().decided_at > 1_600_000_000


# ---------------------------------------- invariant 10 (subsets and payloads)


def test_a_barrier_may_cover_a_named_subset(world):
    one, three = world.start(1), world.start(3)
    for client in (one, three):
        client.join(world_size=4, participants=(1, 3))
    one.arrive()
    decision = three.arrive()
    assert (decision.outcome, decision.required) == (Outcome.RELEASED, 2)


def test_a_rank_outside_of_the_subset_cannot_join(world):
    two = world.start(2)
    two.join(world_size=4, participants=(1, 3))
    assert two.reason is Reason.NOT_A_PARTICIPANT
    assert "participants 1, 3 of world size 4 does not include rank 2" in two.refusals[-1].refusal.message


def test_a_barrier_gathers_a_small_payload_from_each_rank_for_all(world):
    zero, one = world.ranks()
    one.arrive(payload=b"from 1")
    zero.arrive(payload=b"from 0")
    assert zero.last.payloads == one.last.payloads == ((0, b"from 0"), (1, b"from 1"))


def test_a_failed_barrier_gathers_nothing(world):
    zero, one = world.ranks()
    zero.arrive(payload=b"secret")
    one.arrive(failure="no")
    assert zero.last.payloads == ()


def test_payloads_are_kept_only_until_the_next_release(world):
    zero, one = world.ranks()
    for sequence in range(3):
        zero.arrive(payload=b"x")
        one.arrive(payload=b"y")
        assert list(world.group().decisions) == [sequence]
    assert one.outcomes == [Outcome.RELEASED] * 3


# ---------------------------------------- invariant 11 (the newer fences the older)


def test_the_newer_generation_fences_the_older_everywhere(world):
    old_zero, old_one = world.ranks()
    new = world.start(0, generation=1)
    new.join()
    for attempt in (old_zero.arrive, old_zero.join, lambda: old_zero.join("eval")):
        attempt()
        assert old_zero.reason is Reason.STALE_GENERATION
    old_one.lose_connection()
    old_one.connect()
    assert old_one.reason is Reason.STALE_GENERATION
    assert old_one.refusals[-1].final
    assert "generation 0 of run job1 is over: generation 1 has started" in (
        old_one.refusals[-1].refusal.message
    )


def test_the_death_of_an_old_generation_is_no_loss_to_the_new(world):
    old = world.ranks()
    new = world.ranks(generation=1)
    new[0].arrive()
    for client in old:
        client.die()
    world.wait(2 * TTL)
    assert new[1].arrive().outcome is Outcome.RELEASED


def test_the_newest_incarnation_speaks_and_what_the_older_sends_is_refused(world):
    older, other = world.ranks()
    newer = world.start(0)
    newer.join()
    older.arrive()
    assert older.reason is Reason.SUPERSEDED
    assert f"rank 0 (node-0, pid {newer.pid}) said hello later" in older.refusals[-1].refusal.message
    older.join()
    assert older.reason is Reason.SUPERSEDED
    other.arrive()
    assert newer.arrive().outcome is Outcome.RELEASED
    assert older.outcomes == []


def test_the_open_arrival_of_a_superseded_process_is_withdrawn_and_it_is_told(world):
    older, other = world.ranks()
    older.arrive(payload=b"old")
    newer = world.start(0)
    newer.join()
    assert older.reason is Reason.SUPERSEDED
    other.arrive()
    assert other.outcomes == []
    newer.arrive(payload=b"new")
    assert other.last.payloads == ((0, b"new"),)


def test_an_older_process_cannot_take_a_group_from_a_newer_one(world):
    older = world.start(0)
    newer = world.start(0)
    newer.join()
    older.join()
    assert older.reason is Reason.SUPERSEDED


def test_incarnations_are_ordered_by_their_first_hello_and_not_by_their_last(world):
    older, other = world.ranks()
    newer = world.start(0)
    newer.join()
    older.reconnect()
    assert older.reason is Reason.SUPERSEDED
    other.arrive()
    assert newer.arrive().outcome is Outcome.RELEASED


def test_several_processes_may_speak_for_one_rank_each_in_its_own_groups(world):
    trainers = world.ranks(prefix="train")
    writers = world.ranks(prefix=CKPT)
    trainers[0].arrive("train")
    writers[0].arrive(CKPT)
    writers[1].arrive(CKPT)
    trainers[1].arrive("train")
    assert writers[0].outcomes == [Outcome.RELEASED]
    assert trainers[0].seats["train"].heard[-1].outcome is Outcome.RELEASED
    assert all(client.refusals == [] for client in trainers + writers)


# ---------------------------------------- invariant 12 (the coordinator assigns the sequence)


def test_the_coordinator_knows_the_sequence_and_tells_it_at_the_join(world):
    zero, one = world.ranks()
    for _ in range(3):
        zero.arrive()
        one.arrive()
    one.die()
    assert world.start(1).join() == 3


def test_a_ranks_first_process_hears_call_by_call_what_it_was_missing_from(world):
    zero = world.start(0)
    failed = [zero.arrive(failure=reason) for reason in ("a", "b")]
    latecomer = world.start(1)
    assert latecomer.join() == 0
    assert [latecomer.arrive(), latecomer.arrive()] == failed
    latecomer.arrive()
    assert zero.arrive().outcome is Outcome.RELEASED


def test_a_restarted_process_starts_at_the_next_undecided_sequence(world):
    zero, one = world.ranks()
    zero.arrive(failure="a")
    one.die()
    restarted = world.start(1)
    assert restarted.join() == 1


def test_nobody_is_told_released_for_a_barrier_that_its_own_incarnation_did_not_arrive_at(world):
    zero, one = world.ranks()
    zero.arrive()
    one.arrive()
    restarted = world.start(1)
    assert restarted.join() == 1
    refused = world.refused(Arrive(restarted.session, CKPT, 0, TIMEOUT, (Arrival(1),)))
    assert refused.refusal.reason is Reason.SEQUENCE_BEHIND
    assert refused.refusal.metadata["start_sequence"] == "1"


def test_nobody_is_told_released_for_a_barrier_that_went_on_without_it(world):
    zero, one, three = world.start(0), world.start(1), world.start(3)
    three.join(world_size=4)
    three.lose_connection()
    world.wait(TTL)
    for client in (zero, one):
        client.join(world_size=2)
        client.arrive()
    assert zero.outcomes == [Outcome.RELEASED]
    three.connect()
    three.arrive()
    assert three.reason is Reason.SEQUENCE_BEHIND
    assert three.outcomes == []


def test_a_first_process_behind_a_release_that_did_not_need_it_starts_after_that(world):
    alone = world.start(0)
    alone.join(world_size=1)
    alone.arrive()
    second = world.start(1)
    assert second.join(world_size=2) == 1


def test_when_a_new_generation_joins_the_open_barrier_is_over(world):
    zero, _ = world.ranks()
    zero.arrive()
    newcomer = world.start(0, generation=3)
    assert zero.last.outcome is Outcome.ABORTED
    assert "superseded by generation 3" in zero.last.message
    assert newcomer.join() == 1


def test_a_new_generation_starts_where_the_last_one_ended_and_may_have_another_world_size(world):
    old = world.ranks()
    for client in old:
        client.arrive()
    new = [world.start(r, generation=1) for r in range(3)]
    assert [client.join(world_size=3) for client in new] == [1, 1, 1]
    for client in new:
        client.arrive()
    assert {client.last.outcome for client in new} == {Outcome.RELEASED}
    assert new[0].last.generation == 1


def test_no_newcomer_fails_with_the_dead_of_the_last_generation(world):
    for client in world.ranks():
        client.goodbye()
    new = world.ranks(generation=1)
    new[0].arrive()
    world.wait(2 * TTL)
    assert new[1].arrive().outcome is Outcome.RELEASED


def test_no_newcomer_fails_with_a_dead_rank_that_has_not_yet_come_back_in_the_new_generation(world):
    _, one = world.ranks()
    one.goodbye()
    newcomer = world.start(0, generation=1)
    newcomer.arrive()
    assert newcomer.outcomes == []
    assert world.start(1, generation=1).arrive().outcome is Outcome.RELEASED


def test_a_latecomer_of_a_new_generation_starts_at_the_generations_first_sequence(world):
    for client in world.ranks():
        client.arrive()
    zero = world.start(0, generation=1)
    failed = zero.arrive(failure="a")
    one = world.start(1, generation=1)
    assert one.join() == 1
    assert one.arrive() == failed


@pytest.mark.parametrize("acts_elsewhere", [False, True])
def test_helper_does_not_hide_the_death_of_its_trainer(world, acts_elsewhere):
    zero, one = world.ranks()
    helper = world.start(1)
    if acts_elsewhere:
        helper.join("helper")
    world.wait(SUCCESSION_WINDOW)
    zero.arrive()
    one.die()
    world.wait(TTL)
    assert zero.outcomes == [Outcome.MEMBER_LOST]
    (missing,) = zero.last.missing
    assert (missing.pid, missing.state) == (one.pid, MissingState.CONNECTION_LOST)
    world.assert_good()


def test_new_helper_hides_the_death_of_its_trainer_for_a_while_only(world):
    zero, one = world.ranks()
    world.wait(100.0)
    world.start(1)
    zero.arrive()
    one.die()
    world.wait(SUCCESSION_WINDOW - 1.0)
    assert zero.outcomes == []
    world.wait(1.0)
    assert zero.outcomes == [Outcome.MEMBER_LOST]
    assert zero.last.missing[0].pid == one.pid


def test_new_helper_that_was_away_for_a_moment_is_an_heir_no_longer_than_before(world):
    zero, one = world.ranks()
    helper = world.start(1)
    world.wait(SUCCESSION_WINDOW - TTL / 2)
    helper.lose_connection()
    zero.arrive()
    one.die()
    world.wait(1.0)
    helper.connect()
    world.wait(TTL)
    assert zero.outcomes == [Outcome.MEMBER_LOST]


def test_new_process_takes_over_from_a_dead_one_within_its_time(world):
    zero, one = world.ranks()
    zero.arrive()
    one.lose_connection()
    world.wait(TTL - 1.0)
    new = world.start(1)
    world.wait(SUCCESSION_WINDOW - 1.0)
    assert zero.outcomes == []
    assert new.arrive().outcome is Outcome.RELEASED
    world.wait(2.0)
    new.die()
    zero.arrive()
    world.wait(TTL)
    assert zero.outcomes == [Outcome.RELEASED, Outcome.MEMBER_LOST]


@pytest.fixture
def restarted(world):
    """Rank 0, and rank 1 that was started again: since then it has joined one of its two groups."""
    zero, one = world.ranks()
    for client in (zero, one):
        client.join("eval")
    one.die()
    world.wait(TTL)
    new = world.start(1)
    new.join()
    world.wait(SUCCESSION_WINDOW)
    return zero, new


@pytest.mark.parametrize("restarts", [False, True])
def test_restarted_trainer_is_waited_for_in_the_groups_that_it_has_not_joined(world, restarted, restarts):
    zero, new = restarted
    if restarts:
        world.crash()
        for client in restarted:
            client.connect()
        world.wait(SUCCESSION_WINDOW)
    zero.arrive("eval")
    world.wait(2 * TTL)
    assert zero.seats["eval"].heard == []
    group = world.group("eval")
    (missing,) = group.missing(some(group.open), world.instant, [1])
    assert (missing.pid, missing.state) == (new.pid, MissingState.NOT_ARRIVED)
    assert new.arrive("eval").outcome is Outcome.RELEASED
    world.assert_good()


@pytest.mark.parametrize("restarts", [False, True])
def test_death_of_a_restarted_trainer_counts_in_the_groups_that_it_has_not_joined(world, restarted, restarts):
    zero, new = restarted
    if restarts:
        world.crash()
        zero.connect()
    zero.arrive("eval")
    new.alive = False
    if not restarts:
        new.lose_connection()
    world.wait(TTL)
    assert [decision.outcome for decision in zero.seats["eval"].heard] == [Outcome.MEMBER_LOST]
    world.assert_good()


def test_trainer_that_was_restarted_twice_is_waited_for_in_the_groups_of_the_first(world, restarted):
    zero, new = restarted
    new.die()
    world.wait(TTL)
    world.start(1).join()
    world.wait(SUCCESSION_WINDOW)
    zero.arrive("eval")
    world.wait(2 * TTL)
    assert zero.seats["eval"].heard == []


def test_restarted_trainer_is_waited_for_when_it_took_over_a_group_that_nobody_else_is_in(world):
    zero, one = world.ranks()
    one.join("own", participants=(1,))
    one.die()
    world.wait(TTL)
    world.start(1).join("own", participants=(1,))
    world.wait(SUCCESSION_WINDOW)
    zero.arrive()
    world.wait(2 * TTL)
    assert zero.outcomes == []


@pytest.mark.parametrize("restarts", [False, True])
def test_successor_of_a_process_that_took_over_another_group_since_is_waited_for(world, restarts):
    zero, _ = world.ranks()
    two, three = world.start(1), world.start(1)
    for client, prefix in ((two, "eval"), (three, "eval"), (two, CKPT)):
        client.join(prefix)
    if restarts:
        world.crash()
        for client in (zero, two, three):
            client.connect()
    world.wait(SUCCESSION_WINDOW)
    zero.arrive()
    two.die()
    world.wait(2 * TTL)
    assert zero.outcomes == []


def test_trainer_that_joins_its_first_group_late_is_waited_for_from_then_on(world):
    zero, one = world.ranks()
    for client in (zero, one):
        client.join("eval")
    one.die()
    new = world.start(1)
    world.wait(SUCCESSION_WINDOW)
    assert zero.arrive("eval").outcome is Outcome.MEMBER_LOST
    new.join()
    assert zero.arrive("eval") is None
    world.wait(2 * TTL)
    assert new.arrive("eval").outcome is Outcome.RELEASED


@pytest.mark.parametrize("restarts", [False, True])
def test_restarted_helper_does_not_hide_the_death_of_its_trainer(world, restarts):
    zero, one = world.ranks()
    world.start(1).join("helper")
    world.start(1).join("helper")
    if restarts:
        world.crash()
        for client in world.clients:
            client.connect()
    world.wait(SUCCESSION_WINDOW)
    zero.arrive()
    one.die()
    world.wait(TTL)
    assert zero.outcomes == [Outcome.MEMBER_LOST]
    assert zero.last.missing[0].pid == one.pid


def test_a_single_restarted_rank_back_within_the_ttl_takes_part_in_the_open_barrier(world):
    zero, one = world.ranks()
    zero.arrive()
    one.die()
    world.wait(TTL - 1)
    back = world.start(1)
    assert back.join() == 0
    assert back.arrive().outcome is Outcome.RELEASED
    assert zero.outcomes == [Outcome.RELEASED]


def test_joining_again_changes_nothing(world):
    zero, one = world.ranks()
    zero.arrive()
    assert world.ask(JoinGroup(zero.session, CKPT, 2))[0].positions == ((0, 0),)
    assert world.last.records == []
    assert one.arrive().outcome is Outcome.RELEASED


# ------------------------------------------------------------ unary calls, whole nodes, operators


def test_a_call_that_names_no_sequence_arrives_at_the_ranks_next():
    world = World(2)
    zero = world.start(0)
    zero.join()
    for sequence in range(3):
        call = world.call(1)
        assert some(zero.arrive()).sequence == sequence
        world.hang_up(call)


def test_a_call_that_names_no_sequence_and_is_repeated_waits_at_the_same_barrier():
    world = World(2)
    zero = world.start(0)
    zero.join()
    for _ in range(3):
        world.hang_up(world.call(1))
    assert some(world.group().open).arrivals.keys() == {1}
    assert some(zero.arrive()).sequence == 0


def test_one_stream_may_speak_for_a_whole_node():
    world = World(4)
    node = world.new_session()
    infos = tuple(ProcessInfo(rank, f"p{rank}", "node-0", rank) for rank in range(4))
    world.do(Hello(node, RUN, 0, infos))
    (joined,) = world.ask(JoinGroup(node, CKPT, 4))
    assert of_kind(GroupJoined, joined).positions == ((0, 0), (1, 0), (2, 0), (3, 0))
    arrivals = tuple(Arrival(rank, str(rank).encode()) for rank in range(4))
    (decision,) = world.ask(Arrive(node, CKPT, 0, TIMEOUT, arrivals))
    assert isinstance(decision, Decision)
    assert decision.outcome is Outcome.RELEASED
    assert decision.payloads == tuple((rank, str(rank).encode()) for rank in range(4))


def test_of_a_join_of_several_ranks_each_is_judged_singly():
    world = World(4)
    node = world.new_session()
    infos = tuple(ProcessInfo(rank, f"p{rank}", "node-0", rank) for rank in range(4))
    world.do(Hello(node, RUN, 0, infos))
    refused, joined = world.ask(JoinGroup(node, CKPT, 4, participants=(0, 1, 2)))
    assert isinstance(refused, Refused)
    assert (refused.refusal.reason, refused.prefix, refused.rank) == (Reason.NOT_A_PARTICIPANT, CKPT, 3)
    assert joined == GroupJoined(CKPT, ((0, 0), (1, 0), (2, 0)))
    assert set(world.group().owners) == {0, 1, 2}


def test_a_join_of_which_nothing_is_left_makes_no_group():
    world = World(4)
    node = world.new_session()
    world.do(Hello(node, RUN, 0, (ProcessInfo(2, "p", "node-0", 1), ProcessInfo(3, "p", "node-0", 1))))
    refused = world.ask(JoinGroup(node, CKPT, 4, participants=(0, 1)))
    assert [of_kind(Refused, one).rank for one in refused] == [2, 3]
    assert world.last.records == []
    assert CKPT not in world.coordinator.runs[RUN].groups


def test_an_operators_abort_ends_the_open_barrier_for_all_and_is_answered(world):
    zero, one = world.ranks()
    zero.arrive()
    decision = world.abort(reason="maintenance")
    assert decision.outcome is Outcome.ABORTED
    assert "was aborted: maintenance" in decision.message
    assert zero.last == decision
    assert one.arrive() == decision


def test_an_operators_abort_of_nothing_is_refused(world):
    zero, _ = world.ranks()
    assert world.abort().refusal.reason is Reason.NO_OPEN_BARRIER
    zero.arrive()
    refused = world.abort(sequence=5)
    assert "has no open barrier #5; its next is #0. Nothing was aborted." in refused.refusal.message
    assert zero.outcomes == []
    unknown = world.refused(Abort(world.new_session(), "job9", CKPT, "x"))
    assert unknown.refusal.reason is Reason.RUN_NOT_FOUND
    assert world.abort("evil").refusal.reason is Reason.BARRIER_NOT_FOUND
