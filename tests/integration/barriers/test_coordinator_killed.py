"""The coordinator is killed at random while ranks meet, and no two ranks hold different outcomes."""

import random
import time
from pathlib import Path

import pytest

from lab.processes.coordinator import Coordinator
from tests.support.ranks import assert_good_history, everyone, ranks
from tests.support.waiters import wait_for_arrivals

pytestmark = [pytest.mark.also_through_relay, pytest.mark.back_in_time]

BARRIERS = 200
KILLS = 12


def test_no_two_ranks_hold_different_outcomes_after_random_kills(coordinator: Coordinator, tmp_path: Path):
    """SQLite, 200 barriers and more, SIGKILL at random moments; the judge reads every rank's history."""
    moments = random.Random(20261120)
    end = tmp_path / "end"
    with ranks(coordinator.endpoint, 4) as world:
        for rank in world:
            rank.tell("mixed", until=str(end), pause=0.0)
        for _ in range(KILLS):
            # Barriers are decided again; an idle wait is wanted then: the moment of the kill is random.
            coordinator.logged("barrier.decided", len(coordinator.log("barrier.decided")) + 1)
            time.sleep(moments.uniform(0.0, 0.1))
            coordinator.restart()
        coordinator.logged("barrier.decided", BARRIERS)
        end.touch()
        (count,) = {len(rank.answer()) for rank in world}
        assert count >= BARRIERS
        assert_good_history(world)


def test_a_coordinator_killed_while_ranks_wait_completes_the_barrier(coordinator: Coordinator):
    with ranks(coordinator.endpoint, 3) as world:
        everyone(world)
        world[0].tell("barrier")
        world[1].tell("barrier")
        wait_for_arrivals(coordinator.endpoint, 2)
        coordinator.restart()
        assert world[2].ask("barrier").outcome == "RELEASED"
        assert [world[n].answer().outcome for n in (0, 1)] == ["RELEASED"] * 2
        assert_good_history(world)


def test_an_outcome_is_remembered_for_a_rank_that_had_not_heard_it(coordinator: Coordinator):
    """Invariant 2 (durable before delivered): the late rank hears the same from the next coordinator."""
    with ranks(coordinator.endpoint, 2) as world:
        world[1].ask("join")
        timed_out = world[0].ask("barrier", timeout=1.0)
        assert timed_out.outcome == "TIMED_OUT"
        coordinator.restart()
        late = world[1].ask("barrier")
        assert (late.outcome, late.sequence, late.message) == (
            timed_out.outcome,
            timed_out.sequence,
            timed_out.message,
        )
