"""One stream that speaks for several ranks. What one process does is in scenarios/barriers."""

from muster.service.core.vocabulary.effects import GroupJoined, Refused
from muster.service.core.vocabulary.events import Arrival, Arrive, Hello, JoinGroup, ProcessInfo
from muster.service.core.vocabulary.model import Decision, Outcome
from muster.service.core.vocabulary.refusal import Reason
from tests.support.expect import of_kind
from tests.support.world.core_client import CKPT, TIMEOUT
from tests.support.world.core_world import RUN, World


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
