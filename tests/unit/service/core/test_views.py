import pytest

from muster.service.core import views
from muster.service.core.model import MemberState, Outcome
from muster.service.core.refusal import Reason, Refusal
from tests.support.core_world import CKPT, RUN, TTL, World


@pytest.fixture
def world():
    """Rank 1 has left after one release and one failure; rank 0 waits at #2, with rank 2 to come."""
    world = World(3)
    zero, one, two = world.ranks()
    for client in (zero, one, two):
        client.arrive()
    zero.arrive(failure="no")
    one.goodbye()
    world.start(1)
    zero.arrive(timeout=100)
    world.now += 5
    return world


def test_runs_are_counted(world):
    world.start(0, run="another")
    first, second = views.runs(world.coordinator)
    assert (first.run_id, first.members, first.groups) == ("another", 1, 0)
    assert (second.run_id, second.connected, second.members) == (RUN, 3, 3)
    assert (second.groups, second.open_barriers, second.decided_barriers) == (1, 1, 2)


def test_members_are_shown_with_their_groups(world):
    world.clients[2].lose_connection()
    world.now += 2
    shown = views.members(world.coordinator.runs[RUN], world.instant)
    assert [(m.rank, m.state) for m in shown] == [
        (0, MemberState.CONNECTED),
        (1, MemberState.LEFT),
        (1, MemberState.CONNECTED),
        (2, MemberState.DISCONNECTED),
    ]
    assert shown[0].groups == ((CKPT, 2),)
    assert shown[2].groups == ()
    assert shown[3].since == 2


def test_an_open_barrier_is_shown_with_its_age_and_who_is_missing(world):
    view = views.barrier(world.coordinator, RUN, CKPT, None, world.instant)
    assert (view.sequence, view.arrived, view.required, view.decision) == (2, 1, 3, None)
    assert (view.age, view.remaining) == (5, 95)
    assert [m.rank for m in view.missing] == [1, 2]
    assert "has waited 5 s: arrived 1 of 3" in view.message


def test_a_decided_barrier_is_shown_as_its_decision(world):
    view = views.barrier(world.coordinator, RUN, CKPT, 1, world.instant)
    assert view.decision is not None
    assert view.decision.outcome is Outcome.ABORTED
    assert view.message == view.decision.message
    world.wait(200)
    last = views.barrier(world.coordinator, RUN, CKPT, None, world.instant)
    assert (last.sequence, last.decision.outcome) == (2, Outcome.TIMED_OUT)


def test_barriers_are_shown_open_first_and_then_the_newest(world):
    shown = views.barriers(world.coordinator, "", 1, world.instant)
    assert [(view.sequence, view.decision is None) for view in shown] == [(2, True), (1, False)]
    assert len(list(views.barriers(world.coordinator, RUN, 9, world.instant))) == 3


@pytest.mark.parametrize(
    ("run", "prefix", "sequence", "reason", "words"),
    [
        ("job9", CKPT, None, Reason.RUN_NOT_FOUND, 'no run "job9" has said hello'),
        ("\x1b[2J", CKPT, None, Reason.RUN_NOT_FOUND, "\\x1b"),
        (RUN, "eval", None, Reason.BARRIER_NOT_FOUND, 'no group "eval"; it has "checkpoint"'),
        (RUN, CKPT, 9, Reason.BARRIER_NOT_FOUND, "kept are #0-1, and the next is #2"),
    ],
)
def test_what_is_not_there_is_refused_and_says_what_there_is(world, run, prefix, sequence, reason, words):
    with pytest.raises(Refusal) as caught:
        views.barrier(world.coordinator, run, prefix, sequence, world.instant)
    assert caught.value.reason is reason
    assert words in caught.value.message


def test_a_group_without_a_barrier_yet_has_none_to_show():
    world = World(2)
    world.ranks()
    assert list(views.barriers(world.coordinator, RUN, 5, world.instant)) == []
    with pytest.raises(Refusal, match="none is decided, and the next is #0"):
        views.barrier(world.coordinator, RUN, CKPT, None, world.instant)
    assert world.coordinator.next_deadline() is None
    world.clients[0].lose_connection()
    assert world.coordinator.next_deadline() == world.now + TTL
