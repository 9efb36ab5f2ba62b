"""An operator sends a rank's processes away: what needs them fails at once, and they do not come back."""

import pytest

from muster.service.core.vocabulary.effects import Evicted, Refused
from muster.service.core.vocabulary.events import Evict
from muster.service.core.vocabulary.model import MemberState, MissingState, Outcome
from muster.service.core.vocabulary.refusal import Reason
from tests.support.world.core_disk import Crash
from tests.support.world.core_world import RUN, TTL
from tests.support.world.rendezvous_world import RendezvousWorld


@pytest.fixture
def world():
    """Three ranks that take part in the group."""
    world = RendezvousWorld()
    world.world_size = 3
    world.ranks()
    return world


def test_barriers_that_need_an_evicted_rank_fail_at_once_and_say_so(world):
    zero, one, two = world.clients
    zero.arrive()
    two.arrive("eval")
    assert world.evict(1, "bad disk") == Evicted()
    for decision in (zero.last, two.memberships["eval"].heard[-1]):
        assert decision.outcome is Outcome.MEMBER_LOST
    (first, second) = zero.last.missing
    assert (first.rank, first.state, first.host, first.pid) == (1, MissingState.EVICTED, one.host, one.pid)
    assert (second.rank, second.state) == (2, MissingState.NOT_ARRIVED)
    assert f"lost rank 1 (node-0, pid {one.pid}, evicted 0 ms ago)" in zero.last.message
    world.assert_good()


def test_barrier_that_an_evicted_rank_has_arrived_at_goes_on(world):
    zero, one, two = world.clients
    one.arrive()
    world.evict(1)
    zero.arrive()
    assert two.arrive().outcome is Outcome.RELEASED
    assert zero.arrive().outcome is Outcome.MEMBER_LOST


def test_next_barrier_fails_at_its_first_arrival(world):
    world.evict(1)
    assert world.clients[0].arrive().outcome is Outcome.MEMBER_LOST


def test_evicted_process_is_refused_when_it_comes_back(world):
    one = world.clients[1]
    world.evict(1)
    assert (one.reason, one.session) == (Reason.EVICTED, None)
    one.connect()
    assert one.reason is Reason.EVICTED
    assert f"rank 1 (node-0, pid {one.pid}) was evicted from run job1, generation 0" in (
        one.refusals[-1].refusal.message
    )


def test_evicted_process_that_was_away_is_refused_when_it_comes_back(world):
    one = world.clients[1]
    one.lose_connection()
    world.evict(1)
    one.connect()
    assert one.reason is Reason.EVICTED


def test_evicted_process_is_refused_after_a_restart(world):
    one = world.clients[1]
    world.evict(1)
    world.crash()
    one.connect()
    assert one.reason is Reason.EVICTED
    assert world.clients[0].session is None
    world.clients[0].connect()
    assert world.clients[0].arrive().missing[0].state is MissingState.EVICTED


def test_evicted_process_without_a_group_is_refused_after_a_restart(world):
    idle = world.start(5)
    assert world.evict(5) == Evicted()
    world.crash()
    idle.connect()
    assert idle.reason is Reason.EVICTED


@pytest.mark.parametrize("crash", Crash)
def test_unanswered_eviction_is_whole_or_absent_after_a_restart(world, crash):
    one = world.clients[1]
    world.crash_next = crash
    world.do(Evict(world.new_session(), RUN, 1, ""))
    one.connect()
    assert [r.refusal.reason for r in one.refusals] == [Reason.EVICTED] * (crash is Crash.AFTER_PERSIST)


def test_all_processes_of_the_rank_are_evicted(world):
    one, child = world.clients[1], world.start(1)
    world.evict(1)
    assert (one.reason, child.reason) == (Reason.EVICTED, Reason.EVICTED)
    states = {p.state for p in world.coordinator.runs[RUN].roster.of_rank(1)}
    assert states == {MemberState.EVICTED}


def test_new_process_of_the_rank_may_come_and_takes_part(world):
    zero, one, two = world.clients
    world.evict(1)
    new = world.start(1)
    new.join()
    zero.arrive()
    new.arrive()
    assert two.arrive().outcome is Outcome.RELEASED
    one.connect()
    assert one.reason is Reason.EVICTED
    world.crash()
    new.connect()
    one.connect()
    assert (new.refusals, one.reason) == ([], Reason.EVICTED)


def test_new_process_may_be_evicted_as_well(world):
    world.evict(1)
    new = world.start(1)
    assert world.evict(1) == Evicted()
    assert new.reason is Reason.EVICTED
    newer = world.start(1)
    assert newer.refusals == []


def test_new_generation_is_not_bound_by_an_eviction(world):
    world.evict(1)
    later = world.start(1, generation=1)
    assert later.refusals == []
    world.crash()
    later.connect()
    assert later.refusals == []
    world.evict(1)
    assert later.reason is Reason.EVICTED


@pytest.mark.parametrize("rank", [7, -1, 2**31])
def test_rank_that_is_not_there_cannot_be_evicted(world, rank):
    answer = world.evict(rank)
    assert isinstance(answer, Refused)
    assert answer.refusal.reason is Reason.MEMBER_NOT_FOUND
    assert "there are 0-2. List them with: muster get members job1" in answer.refusal.message


def test_rank_that_is_gone_cannot_be_evicted(world):
    world.clients[1].goodbye()
    world.clients[2].lose_connection()
    world.wait(TTL)
    for rank in (1, 2):
        answer = world.evict(rank)
        assert isinstance(answer, Refused)
        assert answer.refusal.reason is Reason.MEMBER_NOT_FOUND


def test_eviction_is_noticed_with_its_reason(world):
    notices = world.do(Evict(world.new_session(), RUN, 1, "bad\x1b disk")).notices
    (notice,) = notices
    assert notice.event == "member.gone"
    assert notice.message.endswith(") was evicted: bad\\x1b disk")


def test_eviction_leaves_the_rendezvous_alone():
    world = RendezvousWorld()
    a, b = world.several("a", "b")
    world.start(0)
    world.evict(0)
    assert world.ranks_of(a, b) == [0, 1]
    world.assert_told()
