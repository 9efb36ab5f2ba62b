"""Which ranks of a relay's stream each message names."""

import pytest

from muster.service.core import views
from muster.service.core.membership.outage import Outage
from muster.service.core.membership.process import audience
from muster.service.core.vocabulary.events import (
    Arrival,
    Arrive,
    Hello,
    JoinGroup,
)
from muster.service.core.vocabulary.model import Decision, Outcome
from tests.support.expect import of_kind, some
from tests.support.world.core_client import CKPT, TIMEOUT
from tests.support.world.core_world import RUN, World
from tests.support.world.relay_node import RELAY, Node, info


@pytest.fixture
def world() -> World:
    return World(4)


def test_decision_for_a_relay_names_its_ranks(world: World):
    nodes, own = (Node(world, 0, 1), Node(world, 2)), world.start(3)
    own.join()
    nodes[0].arrive(1)
    nodes[1].arrive(2)
    nodes[0].arrive(0)
    own.arrive()
    (decision,) = world.last.decisions
    assert [node.messages for node in nodes] == [[(decision, [0, 1])], [(decision, [2])]]
    (delivery,) = world.last.deliveries
    assert delivery.audience[some(own.session)] == frozenset()


def test_failure_and_progress_go_only_to_arrived_ranks(world: World):
    node = Node(world, 0, 1, 2, 3)
    node.arrive(0, 2)
    world.tick()  # The missing are asked what they do.
    world.tick()
    ((_, ranks),) = node.messages
    assert ranks == [0, 2]
    world.tick()  # And once more.
    world.tick()
    ((decision, ranks),) = node.messages
    assert (of_kind(Decision, decision).outcome, ranks) == (Outcome.TIMED_OUT, [0, 2])


def test_successor_on_a_relay_does_not_hear_an_earlier_release(world: World):
    node, other = Node(world, 0, 1), Node(world, 2, 3)
    node.arrive(0, 1)
    node.remove_processes(0)
    node.add_processes(info(0, "younger"))
    other.arrive(2, 3)
    (decision,) = world.last.decisions
    assert decision.outcome is Outcome.RELEASED
    assert node.messages == [(decision, [1])]


def test_moved_process_hears_the_decision_on_its_new_stream(world: World):
    node, other = Node(world, 0, 1), Node(world, 2, 3)
    node.arrive(0, 1)
    other.add_processes(info(1))
    other.arrive(2, 3)
    assert [stream.messages[0][1] for stream in (node, other)] == [[0], [1, 2, 3]]


def test_repeated_arrivals_of_a_relay_share_one_answer(world: World):
    node = Node(world, 0, 1, 2, 3)
    node.arrive(0, 1, 2, 3)
    (decision,) = world.last.decisions
    node.arrive(0, 3)
    assert node.messages == [(decision, [0, 3])]
    first, second = Arrival(1), Arrival(2)
    world.do(*(Arrive(node.session, CKPT, 0, TIMEOUT, (one,)) for one in (first, second)))
    assert node.messages == [(decision, [1, 2])], "as well if they ask in one batch"


def test_repeated_arrivals_of_own_streams_are_answered_each():
    world = World(2)
    stream = world.new_session()
    world.do(Hello(stream, RUN, 0, (info(0), info(1))))
    world.do(JoinGroup(stream, CKPT, 2))
    world.do(Arrive(stream, CKPT, 0, TIMEOUT, (Arrival(0), Arrival(1))))
    world.do(Arrive(stream, CKPT, 0, TIMEOUT, (Arrival(0), Arrival(1))))
    assert [dict(to) for to, _ in world.last.deliveries] == [{stream: frozenset()}] * 2


def test_audience_has_each_session_once_and_names_ranks_for_relays_only(world: World):
    node = Node(world, 2, 0)
    stream = world.new_session()
    world.do(Hello(stream, RUN, 0, (info(1), info(3))))
    world.coordinator.runs[RUN].roster.of_rank(3)[0].disconnect(world.now, 10.0, 10.0, Outage(world.now))
    roster = world.coordinator.runs[RUN].roster
    assert audience(roster) == {stream: frozenset(), node.session: {0, 2}}


def test_members_and_hosts_show_the_relay_of_each_process(world: World):
    Node(world, 0)
    world.start(1)
    run = world.coordinator.runs[RUN]
    assert [member.relay for member in views.members(run, world.instant)] == [RELAY, ""]
    assert [(host.ranks, host.relay) for host in views.hosts(run)] == [((0,), RELAY), ((1,), "")]
