"""Real ranks, killed, stopped and restarted under a real coordinator."""

import signal
import socket
from pathlib import Path

import pytest

from lab.processes.coordinator import Coordinator
from tests.support.ranks import everyone, ranks
from tests.support.waiters import wait_for_arrivals

pytestmark = pytest.mark.also_through_relay


def outcomes(heard):
    return [(one.outcome, one.sequence) for one in heard]


def test_ranks_meet_and_gather(coordinator: Coordinator):
    with ranks(coordinator.endpoint, 3) as world:
        assert outcomes(everyone(world)) == [("RELEASED", 0)] * 3
        for rank in world:
            rank.tell("barrier", payload=f"from {rank.rank}".encode())
        assert [one.answer().payloads for one in world] == [(b"from 0", b"from 1", b"from 2")] * 3


def test_a_killed_rank_is_named_to_everyone_within_the_session_ttl(coordinator: Coordinator):
    with ranks(coordinator.endpoint, 3) as world:
        everyone(world)
        world[2].kill()
        heard = everyone(world[:2])
        assert outcomes(heard) == [("MEMBER_LOST", 1)] * 2
        for one in heard:
            (missing,) = one.missing
            assert (missing.rank, missing.pid) == (2, world[2].pid)
            assert missing.host == socket.gethostname()
            assert missing.state.name == "CONNECTION_LOST"
            # By the coordinator's own clock: after the TTL of 3 s, long before the timeout of 60.
            assert 3.0 <= missing.last_seen < 30.0
            assert f"rank 2 ({missing.host}, pid {world[2].pid}, connection lost" in one.message
        assert len({one.message for one in heard}) == 1


def test_a_stopped_rank_is_found_by_keepalive(coordinator: Coordinator):
    """SIGSTOP leaves the connection open: only unanswered pings tell."""
    with ranks(coordinator.endpoint, 2) as world:
        everyone(world)
        world[1].kill(signal.SIGSTOP)
        assert outcomes([world[0].ask("barrier")]) == [("MEMBER_LOST", 1)]
        world[1].kill(signal.SIGCONT)
        # It comes late, hears what it was missing from, and is in step again.
        assert outcomes([world[1].ask("barrier")]) == [("MEMBER_LOST", 1)]
        assert outcomes(everyone(world)) == [("RELEASED", 2)] * 2


def test_a_vote_aborts_for_everyone_and_the_next_barrier_works(coordinator: Coordinator):
    with ranks(coordinator.endpoint, 3) as world:
        world[0].tell("barrier")
        world[1].tell("barrier", failure="disk full: /ckpt")
        world[2].tell("barrier")
        heard = [one.answer() for one in world]
        assert outcomes(heard) == [("ABORTED", 0)] * 3
        assert all("rank 1" in one.message and "disk full: /ckpt" in one.message for one in heard)
        assert outcomes(everyone(world)) == [("RELEASED", 1)] * 3


def test_log_of_waiting_ranks_names_the_straggler(coordinator: Coordinator):
    with ranks(coordinator.endpoint, 2) as world:
        everyone(world, "join")
        assert world[0].ask("barrier", timeout=3.0).outcome == "TIMED_OUT"
        (warning,) = world[0].ask("logged")
        assert "arrived 1 of 2" in warning
        assert f"rank 1 ({socket.gethostname()}, pid {world[1].pid}" in warning


def test_of_two_processes_that_claim_one_rank_the_newer_speaks(coordinator: Coordinator):
    """The older one is told who took over, even while it waits."""
    with ranks(coordinator.endpoint, 2) as world, ranks(coordinator.endpoint, 2, 1) as (newer,):
        world[0].ask("join")
        world[1].ask("join")
        world[1].tell("barrier")
        newer.tell("barrier")
        refused = world[1].answer()
        assert (refused.outcome, refused.reason) == ("RefusedError", "SUPERSEDED")
        assert f"pid {newer.pid}" in refused.message
        assert outcomes([world[0].ask("barrier"), newer.answer()]) == [("RELEASED", 0)] * 2
        assert world[1].ask("barrier").reason == "SUPERSEDED"


def test_a_trainer_and_its_checkpoint_process_speak_for_one_rank(coordinator: Coordinator):
    """Each in its own group: neither fences the other."""
    with ranks(coordinator.endpoint, 2) as trainers, ranks(coordinator.endpoint, 2) as savers:
        for _ in range(3):
            for trainer, saver in zip(trainers, savers, strict=True):
                trainer.tell("barrier", prefix="eval")
                saver.tell("barrier", prefix="checkpoint")
            heard = [one.answer().outcome for one in (*trainers, *savers)]
            assert heard == ["RELEASED"] * 4


@pytest.mark.back_in_time
def test_a_restarted_rank_takes_part_in_the_open_barrier(coordinator: Coordinator):
    with ranks(coordinator.endpoint, 2) as world:
        for sequence in range(3):
            assert outcomes(everyone(world)) == [("RELEASED", sequence)] * 2
        world[1].kill()
        world[0].tell("barrier")
        with ranks(coordinator.endpoint, 2, 1) as (restarted,):
            assert outcomes([restarted.ask("barrier"), world[0].answer()]) == [("RELEASED", 3)] * 2


def test_a_new_generation_of_another_size_ends_the_open_barrier_of_the_old(
    coordinator: Coordinator,
):
    with ranks(coordinator.endpoint, 3) as old:
        everyone(old)
        old[0].tell("barrier")
        old[1].tell("barrier")
        wait_for_arrivals(coordinator.endpoint, 2)
        with ranks(coordinator.endpoint, 2, generation=1) as new:
            assert outcomes(everyone(new)) == [("RELEASED", 2)] * 2
            for heard in (old[0].answer(), old[1].answer()):
                assert (heard.outcome, heard.sequence) == ("ABORTED", 1)
                assert "superseded by generation 1" in heard.message
            assert old[2].ask("barrier").reason == "STALE_GENERATION"
            assert outcomes(everyone(new)) == [("RELEASED", 3)] * 2


def test_restarted_job_takes_its_new_world_size_under_its_old_name(
    coordinator: Coordinator,
):
    with ranks(coordinator.endpoint, 3) as first:
        everyone(first)
        everyone(first, "goodbye")
    with ranks(coordinator.endpoint, 2) as second:
        assert outcomes(everyone(second)) == [("RELEASED", 1)] * 2


def test_a_different_world_size_is_an_error_for_all(coordinator: Coordinator):
    with (
        ranks(coordinator.endpoint, 3, 0, 1) as world,
        ranks(coordinator.endpoint, 4, 2) as (other,),
    ):
        everyone([*world, other], "join")
        heard = everyone([*world, other])
        assert outcomes(heard) == [("MISMATCHED", 0)] * 3
        assert all("says 3" in one.message and "says 4" in one.message for one in heard)


def test_a_subset_of_the_ranks_meets_without_the_others(coordinator: Coordinator):
    with ranks(coordinator.endpoint, 4, 1, 3) as pair:
        heard = everyone(pair, prefix="odd", participants=[1, 3], payload=b"x")
        assert outcomes(heard) == [("RELEASED", 0)] * 2
        assert len(heard[0].payloads) == 2
    with ranks(coordinator.endpoint, 4, 0) as (outsider,):
        refused = outsider.ask("join", prefix="odd", participants=[1, 3])
        assert refused.reason == "NOT_A_PARTICIPANT"


def test_forked_children_do_file_io_while_the_session_goes_on(
    coordinator: Coordinator, tmp_path: Path, thorough: bool
):
    """Forks from a process with an active session: every child saves with torch and ends with 0."""
    forks = 200 if thorough else 50
    with ranks(coordinator.endpoint, 2) as world:
        everyone(world)
        world[0].tell("fork_and_save", folder=str(tmp_path), count=forks)
        statuses = world[0].answer()
        assert statuses == [0] * forks
        assert len(list(tmp_path.glob("child-*.pt"))) == forks
        assert outcomes(everyone(world)) == [("RELEASED", 1)] * 2
        assert "forked" in world[0].ask("barrier_in_forked_child", prefix="checkpoint")


@pytest.mark.back_in_time
def test_a_drained_coordinator_fails_nobody(coordinator: Coordinator):
    """SIGTERM while ranks wait: they connect again and the barrier completes."""
    with ranks(coordinator.endpoint, 2) as world:
        everyone(world)
        world[0].tell("barrier")
        wait_for_arrivals(coordinator.endpoint, 1)
        assert coordinator.stop() == 0
        assert not world[0].has_answered()
        coordinator.start()
        assert outcomes([world[1].ask("barrier"), world[0].answer()]) == [("RELEASED", 1)] * 2


@pytest.mark.back_in_time
def test_an_unreachable_coordinator_leaves_the_outcome_unknown(coordinator: Coordinator):
    with ranks(coordinator.endpoint, 2) as world:
        everyone(world)
        coordinator.kill()
        heard = world[0].ask("barrier", timeout=2.0)
        assert heard.outcome == "UNKNOWN"
        assert "is unknown" in heard.message
        assert coordinator.endpoint in heard.message
        coordinator.start()
        # The same sequence is asked for again.
        assert outcomes(everyone(world)) == [("RELEASED", 1)] * 2


def test_rank_that_left_before_the_next_hello_is_not_waited_for(coordinator: Coordinator):
    with ranks(coordinator.endpoint, 2) as world:
        assert world[0].ask("join").outcome == "JOINED"
        world[0].ask("goodbye")
        heard = world[1].ask("barrier")
        assert heard.outcome == "MEMBER_LOST"
        (missing,) = heard.missing
        assert (missing.rank, missing.pid, missing.state.name) == (0, world[0].pid, "LEFT")


def test_rank_that_starts_after_the_others_left_waits_for_their_return(coordinator: Coordinator):
    with ranks(coordinator.endpoint, 2, 0) as (first,):
        first.ask("join")
        first.ask("goodbye")
        with ranks(coordinator.endpoint, 2) as again:
            again[1].tell("barrier")
            wait_for_arrivals(coordinator.endpoint, 1)
            assert not again[1].has_answered()
            assert outcomes([again[0].ask("barrier"), again[1].answer()]) == [("RELEASED", 0)] * 2
