"""An operator sends the agents of a machine away: their round ends, and the next one forms without them."""

import pytest

from muster.client.save_votes import PREFIX
from muster.service.core import views
from muster.service.core.rendezvous.evictions import MAX_EVICTED, Evictions
from muster.service.core.vocabulary.effects import Evicted, Message, Refused, SaveRequested
from muster.service.core.vocabulary.events import EvictNode, RequestSave
from muster.service.core.vocabulary.model import EvictedNode, NodeStanding
from muster.service.core.vocabulary.refusal import Reason, Refusal
from tests.support.expect import some
from tests.support.world.core_disk import Crash
from tests.support.world.core_world import RUN
from tests.support.world.rendezvous_world import KEEP_ALIVE, LAST_CALL, RendezvousWorld, formed, nodes


def event(world: RendezvousWorld, node: str, *, spare: bool = True, reason: str = "bad disk") -> EvictNode:
    return EvictNode(world.new_session(), RUN, node, "ann", reason, spare)


def evict(world: RendezvousWorld, node: str, *, spare: bool = True) -> Message:
    (answer,) = world.ask(event(world, node, spare=spare))
    return answer


def refusal(world: RendezvousWorld, node: str) -> Refusal:
    answer = evict(world, node)
    assert isinstance(answer, Refused)
    return answer.refusal


# ---------------------------------------------------------------------- what becomes of the nodes


def test_spare_takes_the_rank_of_an_evicted_node():
    world = formed("a", "b", "c")
    a, b, c = world.agents
    assert (a.rank, b.rank, c.stands) == (0, 1, NodeStanding.REDUNDANT)
    assert evict(world, "a") == Evicted()
    assert a.reason is Reason.NODE_EVICTED
    assert some(a.refusal).message == (
        f"node a (pid {a.pid}) was evicted from run job1 by ann: bad disk. End this agent; a new one may "
        "join."
    )
    assert (b.waiting, c.stands) == (2, NodeStanding.WAITING)
    b.join()
    assert world.ranks_of(b, c) == [1, 0]
    world.assert_told()


def test_others_of_the_round_hear_at_once_although_they_heard_just_now():
    world = formed("a", "b", "c", most=3)
    world.wait(5)
    world.agents[2].leave()
    d = world.agent("d")
    before = len(world.agents[1].told_waiting)
    evict(world, "a", spare=False)
    assert len(world.agents[1].told_waiting) == before + 1
    assert d.stands is NodeStanding.WAITING


def test_round_without_waiting_nodes_ends_as_well():
    world = formed("a", "b", fewest=1)
    b = world.agents[1]
    evict(world, "a", spare=False)
    assert b.waiting == 1
    b.join()
    world.wait(LAST_CALL)
    assert some(b.place).world_size == 1
    assert b.waiting == 0


def test_waiting_and_redundant_agents_of_the_machine_are_evicted_too():
    world = formed("a", "b", "a", "c")
    first, _, second, _ = world.agents
    evict(world, "a")
    assert (first.reason, second.reason) == (Reason.NODE_EVICTED, Reason.NODE_EVICTED)
    assert [node.info.address for node in world.rendezvous] == ["b", "c"]


def test_agent_of_a_forming_round_is_evicted():
    world = RendezvousWorld(nodes(3))
    a, b = world.several("a", "b")
    evict(world, "a", spare=False)
    assert a.reason is Reason.NODE_EVICTED
    world.several("c", "d")
    assert some(b.place).world_size == 3


def test_node_matches_by_name_or_address_exactly():
    world = formed("10.0.0.1", "10.0.0.10", "10.0.0.2")
    assert refusal(world, "10.0.0").reason is Reason.NODE_NOT_FOUND
    assert refusal(world, "node-7").reason is Reason.NODE_NOT_FOUND
    one = next(node for node in world.rendezvous if node.info.address == "10.0.0.1")
    one.info = one.info._replace(name="node-7")
    assert evict(world, "node-7") == Evicted()


def test_only_node_of_a_job_is_replaced():
    world = formed("a", "b", fewest=1, most=1)
    evict(world, "a")
    assert some(world.agents[1].place).round == 1


def test_departure_names_the_operator():
    world = formed("a", "b", "c")
    notices = [one for one in world.do(event(world, "a")).notices if one.event == "node.gone"]
    assert [one.message for one in notices] == [
        f"node a (pid {world.agents[0].pid}) of round 0: evicted by ann: bad disk"
    ]


# ---------------------------------------------------------------------- they never come back


def test_evicted_agent_is_refused_whatever_it_asks_for():
    world = formed("a", "b", "c")
    a = world.agents[0]
    place = a.place
    evict(world, "a")
    for round in (place, None):
        a.place = round
        a.connect()
        assert a.reason is Reason.NODE_EVICTED
    a.join()
    assert a.reason is Reason.NODE_EVICTED


def test_agent_that_was_evicted_while_away_is_refused():
    world = formed("a", "b", "c")
    a = world.agents[0]
    a.lose_stream()
    evict(world, "a")
    a.connect()
    assert a.reason is Reason.NODE_EVICTED


@pytest.mark.parametrize("crash", Crash)
def test_eviction_is_whole_or_absent_after_a_restart(crash: Crash):
    world = formed("a", "b", "c")
    a, b, c = world.agents
    world.crash_next = crash
    world.do(event(world, "a"))
    for agent in (a, b, c):
        agent.connect()
    if crash is Crash.BEFORE_PERSIST:
        assert (a.reason, b.waiting, c.stands) == (None, 0, NodeStanding.REDUNDANT)
        return
    assert a.reason is Reason.NODE_EVICTED
    assert b.waiting
    a.join()
    assert a.reason is Reason.NODE_EVICTED
    b.join()
    assert world.ranks_of(b, c) == [1, 0]


def test_others_hear_of_an_eviction_from_a_restarted_coordinator():
    world = formed("a", "b", fewest=1)
    b = world.agents[1]
    world.crash_next = Crash.AFTER_PERSIST
    world.do(event(world, "a", spare=False))
    assert b.waiting == 0
    b.connect()
    assert b.waiting == 1


def test_new_agent_on_the_machine_may_join():
    world = formed("a", "b", "c")
    evict(world, "a")
    again = world.agent("a")
    world.agents[1].join()
    assert world.ranks_of(*world.agents[1:3]) == [1, 0]
    assert again.stands is NodeStanding.REDUNDANT


def test_run_remembers_a_bounded_number_of_evictions():
    evictions = Evictions()
    for number in range(MAX_EVICTED + 1):
        evictions.add(f"i{number}", number)
    assert len(evictions.nodes) == MAX_EVICTED
    assert "i0" not in evictions
    assert evictions.nodes[-1] == EvictedNode(f"i{MAX_EVICTED}", MAX_EVICTED)


# ---------------------------------------------------------------------- what is refused


def test_node_without_agents_is_not_found_and_the_others_are_named():
    world = formed("a", "b", "c")
    refused = refusal(world, "z")
    assert refused.reason is Reason.NODE_NOT_FOUND
    assert refused.message == (
        'run job1 has no agent on node "z"; it has agents on a, b, c. Use one of these names.'
    )


def test_repeated_eviction_does_not_find_the_node():
    world = formed("a", "b", "c")
    evict(world, "a")
    assert refusal(world, "a").reason is Reason.NODE_NOT_FOUND


def test_node_is_not_evicted_without_a_spare():
    world = formed("a", "b", "a")
    refused = refusal(world, "a")
    assert refused.reason is Reason.NO_SPARE
    assert refused.message == (
        "run job1 has 1 agent in its round on node a, and 0 agents of other nodes on standby. Nothing was "
        "evicted. Start 1 agent more on other nodes, and try again."
    )
    assert refused.metadata == {"evicted": "1", "spares": "0"}
    assert world.agents[0].reason is None


def test_spare_that_is_not_connected_does_not_count():
    world = formed("a", "b", "c")
    world.agents[2].lose_stream()
    assert refusal(world, "a").reason is Reason.NO_SPARE
    world.agents[2].connect()
    assert evict(world, "a") == Evicted()


def test_each_participant_needs_a_spare():
    world = formed("a", "a", "b", most=2)
    assert refusal(world, "a").metadata == {"evicted": "2", "spares": "1"}
    world.agent("c")
    assert evict(world, "a") == Evicted()


def test_dry_run_view_shows_the_nodes_and_refuses_alike():
    world = formed("a", "b", "c")
    run = world.coordinator.runs[RUN]
    seen = views.node_eviction(run, "a", world.instant, only_if_spare=True)
    assert [(one.info.address, one.rank, one.standing) for one in seen.nodes] == [
        ("a", 0, NodeStanding.PARTICIPANT)
    ]
    assert seen.spares == 1
    with pytest.raises(Refusal):
        views.node_eviction(run, "z", world.instant, only_if_spare=True)


@pytest.mark.parametrize(("name", "by"), [("", "ann"), ("a" * 300, "ann"), ("a", "")])
def test_unusable_names_are_refused(name: str, by: str):
    world = formed("a", "b", "c")
    answer = world.refused(EvictNode(world.new_session(), RUN, name, by, ""))
    assert answer.refusal.reason is Reason.INVALID_ARGUMENT


def test_closed_run_keeps_its_nodes():
    world = formed("a", "b", "c")
    world.close("ops")
    assert refusal(world, "a").reason is Reason.RUN_CLOSED


# ---------------------------------------------------------------------- signals to ranks of an evicted node


def signalled(world: RendezvousWorld) -> bool:
    """A rank has a signal. Returns whether the save that it asks for ends training."""
    request = RequestSave(world.new_session(), RUN, True, "rank 0", "SIGTERM", known=0)
    (answer,) = world.ask(request)
    assert isinstance(answer, SaveRequested)
    return answer.save.stop


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("spares", [0, 1])
def test_signal_to_a_rank_does_not_stop_a_run_after_a_node_of_the_round_is_evicted(
    spares: int, restarts: bool
):
    world = formed("a", "b", *["c"][:spares], fewest=1)
    world.ranks(2, prefix=PREFIX)
    evict(world, "a", spare=False)
    if restarts:
        world.crash()
    assert not signalled(world)


def test_signal_to_a_rank_of_the_past_round_does_not_stop_the_round_that_forms():
    world = formed("a", "b", "c")
    world.ranks(2, prefix=PREFIX)
    evict(world, "a")
    world.agents[2].lose_stream()
    world.agents[1].join()
    assert not world.rendezvous.complete
    assert not signalled(world)


def test_signal_to_a_rank_of_the_next_round_stops_the_run():
    world = formed("a", "b", "c")
    evict(world, "a")
    world.agents[1].join()
    world.ranks(2, prefix=PREFIX, generation=1)
    assert signalled(world)


def test_stopped_round_keeps_its_nodes():
    world = formed("a", "b")
    clients = world.ranks(2, prefix=PREFIX)
    assert signalled(world)
    for phase in ("agree", "done"):
        for client in clients:
            client.arrive(PREFIX, payload=f"{phase} 9 1 1".encode())
    assert refusal(world, "a").reason is Reason.RUN_STOPPED
    world.agents[0].lose_stream()
    world.wait(KEEP_ALIVE + 1)
    assert [one.nodes_gone for one in world.agents[1].stopped] == [0, 1]
