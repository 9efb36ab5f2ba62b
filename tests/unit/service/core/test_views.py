import pytest

from muster.service.core import barrier_views, views
from muster.service.core.vocabulary.events import Evict
from muster.service.core.vocabulary.model import MemberState, NodeStanding, Outcome
from muster.service.core.vocabulary.refusal import Reason, Refusal
from tests.support.expect import some
from tests.support.world.core_client import CKPT
from tests.support.world.core_world import RUN, TTL, World
from tests.support.world.rendezvous_world import LAST_CALL, RendezvousWorld, nodes

PARTICIPANT = NodeStanding.PARTICIPANT


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
    first, second = views.runs(world.coordinator, world.instant)
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


def test_open_barrier_is_shown_with_age_and_missing_ranks(world):
    view = barrier_views.barrier(world.coordinator, RUN, CKPT, None, world.instant)
    assert (view.sequence, view.arrived, view.required, view.decision) == (2, 1, 3, None)
    assert (view.age, view.remaining) == (5, 95)
    assert [m.rank for m in view.missing] == [1, 2]
    assert "has waited 5 s: arrived 1 of 3" in view.message


def test_decided_barrier_is_shown_as_its_decision(world):
    view = barrier_views.barrier(world.coordinator, RUN, CKPT, 1, world.instant)
    assert view.decision is not None
    assert view.decision.outcome is Outcome.ABORTED
    assert view.message == view.decision.message
    world.wait(200)
    last = barrier_views.barrier(world.coordinator, RUN, CKPT, None, world.instant)
    assert (last.sequence, some(last.decision).outcome) == (2, Outcome.MEMBER_LOST)


def test_barriers_are_shown_open_first_and_then_the_newest(world):
    shown = barrier_views.barriers(world.coordinator, "", 1, world.instant)
    assert [(view.sequence, view.decision is None) for view in shown] == [(2, True), (1, False)]
    assert len(list(barrier_views.barriers(world.coordinator, RUN, 9, world.instant))) == 3


@pytest.mark.parametrize(
    ("run", "prefix", "sequence", "reason", "words"),
    [
        ("job9", CKPT, None, Reason.RUN_NOT_FOUND, 'no run "job9" is known'),
        ("\x1b[2J", CKPT, None, Reason.RUN_NOT_FOUND, "\\x1b"),
        (RUN, "eval", None, Reason.BARRIER_NOT_FOUND, 'no group "eval"; it has "checkpoint"'),
        (RUN, CKPT, 9, Reason.BARRIER_NOT_FOUND, "kept are #0-1, and the next is #2"),
    ],
)
def test_unknown_name_is_refused_with_the_known_ones(world, run, prefix, sequence, reason, words):
    with pytest.raises(Refusal) as caught:
        barrier_views.barrier(world.coordinator, run, prefix, sequence, world.instant)
    assert caught.value.reason is reason
    assert words in caught.value.message


def test_group_without_a_barrier_yet_has_none_to_show():
    world = World(2)
    world.ranks()
    assert list(barrier_views.barriers(world.coordinator, RUN, 5, world.instant)) == []
    with pytest.raises(Refusal, match="none is decided, and the next is #0"):
        barrier_views.barrier(world.coordinator, RUN, CKPT, None, world.instant)
    assert world.coordinator.next_deadline() is None
    world.clients[0].lose_connection()
    assert world.coordinator.next_deadline() == world.now + TTL


# ---------------------------------------------------------------------- nodes, and the end


@pytest.fixture
def job():
    """Nodes b and a in round 0, of which b is away, c waits; d has left, rank 0 is there."""
    job = RendezvousWorld(nodes(2, 3))
    for agent in job.several("b", "a"):
        assert agent.session is not None
    job.wait(LAST_CALL)
    job.agent("d").leave("bye")
    job.agent("c")
    job.wait(2)
    job.agents[0].lose_stream()
    job.start(0)
    job.now += 3
    return job


def test_rendezvous_is_shown_with_its_nodes_and_departures(job):
    b, a, d, c = job.agents
    view = views.rendezvous(job.coordinator.runs[RUN], job.instant)
    assert (view.round, view.complete, view.settings, view.closed) == (0, True, nodes(2, 3), None)
    assert view.nodes == (
        views.NodeView(info=a.info, standing=PARTICIPANT, rank=0, connected=True, since=LAST_CALL + 5),
        views.NodeView(info=b.info, standing=PARTICIPANT, rank=1, connected=False, since=3),
        views.NodeView(info=c.info, standing=NodeStanding.WAITING, rank=None, connected=True, since=5),
    )
    assert [(one.info, one.reason, view.now - one.at) for one in view.departed] == [(d.info, "left (bye)", 5)]
    assert view.rounds == tuple(job.completed)
    assert view.message == "round 0 of run job1 is complete, with 2 nodes in it, 1 waiting to be let in"


def test_rounds_of_a_rendezvous_are_shown_newest_first():
    job = RendezvousWorld(nodes(1))
    a = job.agent("a")
    a.join()
    view = views.rendezvous(job.coordinator.runs[RUN], job.instant)
    assert [one.round for one in view.rounds] == [1, 0]


def test_run_without_nodes_has_an_empty_rendezvous(world):
    view = views.rendezvous(world.coordinator.runs[RUN], world.instant)
    assert (view.complete, view.settings, view.nodes, view.rounds) == (False, None, (), ())
    assert view.message == "no node has joined run job1"
    assert views.run(world.coordinator.runs[RUN], world.instant).round is None


def test_closed_run_says_so(job):
    job.close("me", "done")
    view = views.rendezvous(job.coordinator.runs[RUN], job.instant)
    assert view.message == "run job1 was closed by me: done"
    assert (
        view.closed
        == views.run(job.coordinator.runs[RUN], job.instant).closed
        == job.coordinator.runs[RUN].closed
    )


def test_run_counts_its_nodes(job):
    view = views.run(job.coordinator.runs[RUN], job.instant)
    assert (view.round, view.nodes, view.nodes_waiting, view.closed) == (0, 2, 1, None)
    assert (view.connected, view.members) == (1, 1)


def test_closing_view_shows_effects_and_changes_nothing(job):
    zero = job.clients[0]
    zero.arrive()
    zero.arrive("eval")
    view = views.closing(job.coordinator, RUN)
    assert view == views.ClosingView(
        waiting_nodes=(job.agents[3].info,),
        nodes_in_round=2,
        connected_processes=1,
        open_barriers=((CKPT, 0), ("eval", 0)),
        closed=None,
    )
    assert job.coordinator.runs[RUN].closed is None


def test_closing_ends_the_wait_of_a_round_that_comes_together():
    job = RendezvousWorld(nodes(2))
    a = job.agent("a")
    view = views.closing(job.coordinator, RUN)
    assert (view.waiting_nodes, view.nodes_in_round) == ((a.info,), 0)


def test_eviction_view_shows_effects_and_changes_nothing(world):
    run = world.coordinator.runs[RUN]
    view = views.eviction(run, 2, world.instant)
    assert [(one.rank, one.state) for one in view.members] == [(2, MemberState.CONNECTED)]
    assert view.failed_barriers == ((CKPT, 2),)
    assert views.eviction(run, 0, world.instant).failed_barriers == ()
    with pytest.raises(Refusal) as caught:
        views.eviction(run, 9, world.instant)
    assert caught.value.reason is Reason.MEMBER_NOT_FOUND
    assert run.evictions == {}


def test_eviction_does_what_its_view_shows(world):
    view = views.eviction(world.coordinator.runs[RUN], 1, world.instant)
    effects = world.do(Evict(world.new_session(), RUN, 1, ""))
    assert [(one.prefix, one.sequence) for one in effects.decisions] == list(view.failed_barriers)
    assert [one.incarnation for one in view.members] == [world.clients[3].incarnation]


# ---------------------------------------------------------------------- what one look can bear


def test_processes_that_stand_alike_are_folded_host_by_host(world):
    world.clients[2].lose_connection()
    hosts = views.hosts(world.coordinator.runs[RUN])
    assert {(host.state, host.ranks) for host in hosts} == {
        (MemberState.CONNECTED, (0, 1)),
        (MemberState.LEFT, (1,)),
        (MemberState.DISCONNECTED, (2,)),
    }


def test_host_has_the_steps_that_its_ranks_report(world):
    zero, _, two, *_ = world.clients
    zero.step(7)
    two.step(5)
    (there, gone) = views.hosts(world.coordinator.runs[RUN])
    assert (there.ranks, there.steps) == ((0, 1, 2), (5, 7))
    assert gone.steps is None


@pytest.fixture
def busy():
    """Three groups of four ranks; "a" has waited longest, and misses most."""
    world = World(4)
    clients = world.ranks(prefix="a")
    for client in clients:
        client.join("b")
        client.join("c")
    for prefix, arriving in (("a", 1), ("b", 2), ("c", 3)):
        for client in clients[:arriving]:
            client.arrive(prefix=prefix)
        world.now += 1
    return world


@pytest.mark.parametrize(
    ("most", "most_missing", "shown"),
    [(9, 99, "abc"), (2, 99, "ab"), (9, 6, "abc"), (9, 5, "ab"), (9, 4, "a"), (9, 0, "a"), (0, 99, "")],
)
def test_barriers_that_wait_longest_are_shown_first(busy, most: int, most_missing: int, shown: str):
    groups = busy.coordinator.runs[RUN].groups.values()
    found = barrier_views.longest_open(groups, busy.instant, most=most, most_missing=most_missing)
    assert "".join(view.prefix for view in found) == shown
    assert all(len(view.missing) == view.required - view.arrived for view in found)


def test_newest_decisions_are_shown_first():
    world = World(1)
    (client,) = world.ranks(prefix="a")
    client.join("b")
    for prefix in "aababbb":
        client.arrive(prefix=prefix)
        world.now += 1
    groups = world.coordinator.runs[RUN].groups.values()
    found = [(view.prefix, view.sequence) for view in barrier_views.last_decided(groups, 99)]
    assert found == [("b", 3), ("b", 2), ("b", 1), ("a", 2), ("b", 0), ("a", 1), ("a", 0)]
    for most in range(8):
        assert [(v.prefix, v.sequence) for v in barrier_views.last_decided(groups, most)] == found[:most]
