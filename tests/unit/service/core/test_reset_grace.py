"""A process whose connection ended has a shorter time to come back than one that is silent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.service.core import views
from muster.service.core.coordinator import Coordinator
from muster.service.core.membership.outage import CATCHING_UP, TOGETHER
from muster.service.core.vocabulary.events import Disconnected
from muster.service.core.vocabulary.model import MemberState, NodeStanding, Outcome
from muster.serving.keepalive import SHORTEST, keepalive_within
from tests.support.expect import some
from tests.support.world.core_client import Client
from tests.support.world.core_world import RUN, TTL, World
from tests.support.world.relay_node import Node
from tests.support.world.rendezvous_world import KEEP_ALIVE, Agent, RendezvousWorld, formed, nodes

GRACE = 3.0
SHORT = 0.001


@pytest.fixture
def world() -> World:
    return World(2)


def states(world: World) -> list[MemberState]:
    return [one.state for one in views.members(world.coordinator.runs[RUN], world.instant)]


def reset(world: World, client: Client) -> None:
    session = some(client.session)
    client.stream_breaks()
    client.broken_session = None
    world.do(Disconnected(session, reset=True))


def reset_while_awaited(world: World) -> Client:
    """Rank 0 waits at a barrier for rank 1, whose connection has just ended."""
    zero, one = world.start(0), world.start(1)
    for client in (zero, one):
        client.join()
    zero.arrive()
    reset(world, one)
    return one


# ---------------------------------------------------------------------- ranks


def test_rank_with_a_reset_connection_is_lost_after_the_grace(world: World):
    reset_while_awaited(world)
    world.wait(GRACE - SHORT)
    assert states(world) == [MemberState.CONNECTED, MemberState.DISCONNECTED]
    world.wait(SHORT)
    assert states(world) == [MemberState.CONNECTED, MemberState.LOST]
    (decision,) = world.last.decisions
    assert decision.outcome is Outcome.MEMBER_LOST
    assert decision.missing[0].gone_for == pytest.approx(GRACE)


def test_rank_that_is_back_within_the_grace_has_missed_nothing(world: World):
    one = reset_while_awaited(world)
    world.wait(GRACE - SHORT)
    one.connect()
    world.wait(TTL)
    assert some(one.arrive()).outcome is Outcome.RELEASED


def test_ranks_that_come_back_one_after_the_other_are_not_lost():
    """The coordinator welcomes about a thousand a second, and more may lie behind one proxy."""
    world = World(4)
    clients = [world.start(rank) for rank in range(4)]
    for client in clients:
        reset(world, client)
    for client in clients[:3]:
        world.wait(GRACE - SHORT if client is clients[0] else CATCHING_UP - SHORT)
        client.connect()
    assert states(world) == [MemberState.CONNECTED] * 3 + [MemberState.DISCONNECTED]
    world.wait(CATCHING_UP)
    assert states(world)[3] is MemberState.LOST


def test_rank_is_lost_after_the_session_ttl_although_others_come_back():
    world = World(12)
    clients = [world.start(rank) for rank in range(12)]
    for client in clients:
        reset(world, client)
    for client in clients[:-1]:
        world.wait(0.9)
        client.connect()
    world.wait(TTL - 0.9 * 11 - SHORT)
    assert states(world)[-1] is MemberState.DISCONNECTED
    world.wait(2 * SHORT)
    assert states(world)[-1] is MemberState.LOST


def test_return_after_another_outage_gives_no_time(world: World):
    zero, one = world.start(0), world.start(1)
    reset(world, one)
    world.wait(TOGETHER + SHORT)
    reset(world, zero)
    world.wait(GRACE - TOGETHER - 2 * SHORT)
    zero.connect()
    world.wait(SHORT)
    assert states(world) == [MemberState.CONNECTED, MemberState.LOST]


def test_rank_has_the_session_ttl_to_return_if_the_coordinator_ended_its_stream(world: World):
    """For example, its token was revoked, and it may need time to get another one."""
    world.start(0).lose_connection()
    world.wait(TTL - SHORT)
    assert states(world) == [MemberState.DISCONNECTED]
    world.wait(SHORT)
    assert states(world) == [MemberState.LOST]


def test_each_loss_has_its_own_time(world: World):
    zero = world.start(0)
    reset(world, zero)
    world.wait(GRACE / 2)
    zero.connect()
    zero.lose_connection()
    world.wait(TTL - SHORT)
    assert states(world) == [MemberState.DISCONNECTED]


def test_ranks_behind_a_relay_with_a_reset_connection_have_the_session_ttl_to_return(world: World):
    """The relay may have died alone. Its ranks notice that by their own pings."""
    node = Node(world, 0, 1)
    world.do(Disconnected(node.session, reset=True))
    world.wait(TTL - SHORT)
    assert states(world) == [MemberState.DISCONNECTED] * 2


def test_restored_rank_has_the_session_ttl(world: World):
    zero = world.start(0)
    zero.join()
    world.crash()
    world.wait(TTL - SHORT)
    assert states(world) == [MemberState.DISCONNECTED]


def test_grace_is_no_longer_than_the_session_ttl(world: World):
    world.coordinator = Coordinator(session_ttl=1.0, reset_grace=60.0)
    world.coordinator.serve(world.instant)
    reset(world, world.start(0))
    world.wait(1.0)
    assert states(world) == [MemberState.LOST]


# ---------------------------------------------------------------------- nodes


def lose(world: RendezvousWorld, agent: Agent, *, reset: bool) -> None:
    session = some(agent.session)
    agent.breaks(session)
    agent.unseen.clear()
    world.do(Disconnected(session, reset))


def test_spare_replaces_a_node_with_a_reset_connection_after_the_grace():
    world = formed("a", "b", "c")
    _, b, c = world.agents
    lose(world, world.agents[0], reset=True)
    world.wait(GRACE - SHORT)
    assert (b.waiting, c.stands) == (0, NodeStanding.REDUNDANT)
    world.wait(SHORT)
    assert (b.waiting, c.stands) == (1, NodeStanding.WAITING)
    b.join()
    assert world.ranks_of(b, c) == [1, 0]
    world.assert_told()


def test_node_that_is_back_within_the_grace_keeps_its_place():
    world = formed("a", "b", "c")
    a, b, _ = world.agents
    lose(world, world.agents[0], reset=True)
    world.wait(GRACE - SHORT)
    a.connect()
    world.wait(KEEP_ALIVE)
    assert (a.rank, b.waiting) == (0, 0)


def test_nodes_that_come_back_one_after_the_other_keep_their_places():
    world = RendezvousWorld(nodes(3, 3))
    world.several("a", "b", "c")
    a, b, c = world.agents
    for agent in (a, b, c):
        lose(world, agent, reset=True)
    world.wait(GRACE - SHORT)
    a.connect()
    world.wait(CATCHING_UP - SHORT)
    b.connect()
    world.wait(CATCHING_UP - SHORT)
    c.connect()
    world.wait(KEEP_ALIVE)
    assert [agent.rank for agent in (a, b, c)] == [0, 1, 2]
    assert [agent.waiting for agent in (a, b, c)] == [0, 0, 0]


def test_node_has_the_keep_alive_timeout_to_return_if_the_coordinator_ended_its_stream():
    world = formed("a", "b", "c")
    lose(world, world.agents[0], reset=False)
    world.wait(KEEP_ALIVE - SHORT)
    assert world.agents[1].waiting == 0
    world.wait(SHORT)
    assert world.agents[1].waiting == 1


# ---------------------------------------------------------------------- silence


@given(ttl=st.floats(1.0, 3_600.0), grace=st.floats(0.5, 3_600.0))
def test_silent_process_is_lost_when_the_session_ttl_is_over(ttl: float, grace: float):
    grace = min(grace, ttl)
    keepalive = keepalive_within(ttl, grace)
    assert min(keepalive.interval, keepalive.timeout) >= SHORTEST
    assert keepalive.timeout >= keepalive.interval - 1e-9
    if ttl - grace >= 2.0:
        latest = keepalive.interval + keepalive.timeout + grace
        assert latest == pytest.approx(ttl)
        assert keepalive.interval <= max(1.0, ttl / 5)


def test_default_keepalive():
    keepalive = keepalive_within(10.0, 3.0)
    assert (keepalive.interval, keepalive.timeout) == (2.0, 5.0)
