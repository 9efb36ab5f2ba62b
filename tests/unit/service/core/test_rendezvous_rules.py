"""The rules of the rendezvous, under whatever happens in whatever order.

What must hold at every step is watched by :mod:`tests.support.world.rendezvous_world` and
:mod:`tests.support.world.core_world`; what must hold in the end is asked here, when all are back and time has
passed.
"""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from muster.service.core.vocabulary.events import EvictNode
from muster.service.core.vocabulary.model import NodeStanding
from muster.service.core.vocabulary.refusal import Reason
from tests.support.world.core_disk import Crash
from tests.support.world.core_world import RUN
from tests.support.world.rendezvous_world import Agent, RendezvousWorld, nodes

JOIN = 200.0
LAST_CALL = 20.0
KEEP_ALIVE = 10.0
MAX_AGENTS = 7
ENDS = {
    Reason.RENDEZVOUS_TIMED_OUT,
    Reason.NODE_REMOVED,
    Reason.SESSION_REPLACED,
    Reason.RUN_CLOSED,
    Reason.NODE_NOT_NEEDED,
    Reason.NODE_EVICTED,
    Reason.SUPERSEDED,
}
"""Why a stream of an agent that makes no mistake may end."""

index = st.integers(0, 11)
addresses = st.sampled_from(["node-1", "node-2", "node-10", "10.0.0.9"])
rarely = st.sampled_from([False] * 14 + [True])
crashes = st.sampled_from([None] * 18 + [*Crash])


class Job(RuleBasedStateMachine):
    """A job of a few nodes, which come and go, and its coordinator."""

    def __init__(self) -> None:
        super().__init__()
        self.world = RendezvousWorld(nodes(1))
        self.gone: set[Agent] = set()
        """Those that have left for good, or were killed."""
        self.ended = False
        """Someone has closed the run."""
        self.coordinator = self.world.coordinator
        """The one after the last step."""
        self.placed = False
        """Whether a node had a place after the last step."""
        self.bound_until = 0.0
        """Until when the agreed settings bind after a restart."""

    # ------------------------------------------------------------------ choosing

    @property
    def alive(self) -> list[Agent]:
        return [agent for agent in self.world.agents if agent not in self.gone]

    def pick(self, among: list[Agent], number: int) -> Agent | None:
        return among[number % len(among)] if among else None

    # ------------------------------------------------------------------ nodes

    @initialize(fewest=st.integers(1, 3), more=st.integers(0, 2))
    def start(self, fewest: int, more: int) -> None:
        times = {"join_timeout": JOIN, "last_call_timeout": LAST_CALL, "keep_alive_timeout": KEEP_ALIVE}
        self.world.settings = nodes(fewest, fewest + more, **times)
        self.world.agent("node-1")

    @rule(address=addresses, crash=crashes)
    def a_node_starts(self, address: str, crash: Crash | None) -> None:
        if len(self.alive) < MAX_AGENTS:
            self.world.crash_next = crash
            self.world.agent(address)

    @rule(number=index, seen=st.booleans(), crash=crashes)
    def a_node_joins_anew(self, number: int, seen: bool, crash: Crash | None) -> None:
        if agent := self.pick(self.alive, number):
            agent.lose_stream(seen=seen)
            self.world.crash_next = crash
            agent.join(seen=seen)

    @rule(but=index)
    def all_join_anew(self, but: int) -> None:
        """As they do when they learn that someone waits, or that one of their workers has failed."""
        for agent in self.alive[but % 3 :]:
            agent.join()

    @rule(number=index, seen=st.booleans())
    def a_stream_breaks(self, number: int, seen: bool) -> None:
        if agent := self.pick([agent for agent in self.alive if agent.session is not None], number):
            agent.lose_stream(seen=seen)

    @rule(number=index)
    def the_coordinator_sees_a_broken_stream(self, number: int) -> None:
        if agent := self.pick([agent for agent in self.world.agents if agent.unseen], number):
            agent.coordinator_sees_it()

    @rule(number=index, crash=crashes)
    def a_node_comes_back(self, number: int, crash: Crash | None) -> None:
        """With another stream, though its old one may not be seen to be broken."""
        if agent := self.pick([agent for agent in self.alive if agent.attempt], number):
            self.world.crash_next = crash
            self.come_back(agent)

    def come_back(self, agent: Agent) -> None:
        if agent.refusal is not None:
            agent.join()
        else:
            agent.connect()

    @rule(number=index, crash=crashes)
    def a_node_leaves(self, number: int, crash: Crash | None) -> None:
        if agent := self.pick(self.alive, number):
            self.gone.add(agent)
            agent.lose_stream()
            self.world.crash_next = crash
            agent.leave_unheard("scaled down")

    @rule(fewest=st.integers(1, 3), single=st.booleans(), crash=crashes)
    def a_stray_node_asks_for_other_settings(self, fewest: int, single: bool, crash: Crash | None) -> None:
        """It belongs to another job. It must not replace what the nodes that have a place agreed on."""
        own = self.world.settings
        most = 1 if single and own.max_nodes > 1 else own.max_nodes - 1 or own.max_nodes + 1
        settings = replace(own, min_nodes=min(fewest, most), max_nodes=most)
        before = [agent for agent in self.world.agents if self.has_place(agent)]
        self.world.crash_next = crash
        stray = self.world.agent("stray", settings)
        self.gone.add(stray)
        if stray.session is not None:
            assert not before, "the settings of nodes that have a place are replaced"
            assert stray.place is None or self.world.now >= self.bound_until, "earlier nodes may come back"
        elif stray.refusal is not None:
            assert stray.refusal.reason in (Reason.SETTINGS_DIFFER, Reason.RUN_CLOSED)
            stray.refusal = None
        self.world.crash_next = None
        stray.leave()

    def has_place(self, agent: Agent) -> bool:
        run = self.world.coordinator.runs.get(RUN)
        return run is not None and run.rendezvous.find(agent.incarnation) is not None

    @rule(number=index)
    def a_node_is_killed(self, number: int) -> None:
        if agent := self.pick(self.alive, number):
            self.gone.add(agent)
            agent.lose_stream()

    @precondition(lambda self: RUN in self.world.coordinator.runs)
    @rule(address=addresses, only_if_spare=st.booleans(), crash=crashes)
    def an_operator_evicts_a_machine(self, address: str, only_if_spare: bool, crash: Crash | None) -> None:
        self.world.crash_next = crash
        self.world.do(EvictNode(self.world.new_session(), RUN, address, "ops", "bad disk", only_if_spare))

    # ------------------------------------------------------------------ time, the end, and the coordinator

    @rule(seconds=st.sampled_from([0.3, 1.0, 5.0, KEEP_ALIVE, LAST_CALL, JOIN]))
    def time_passes(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule(crash=crashes, seconds=st.sampled_from([KEEP_ALIVE, LAST_CALL]))
    def the_coordinator_dies_when_a_time_comes(self, crash: Crash | None, seconds: float) -> None:
        self.world.crash_next = crash
        self.world.wait(seconds)
        self.world.crash_next = None

    @rule(sure=rarely)
    def the_coordinator_dies(self, sure: bool) -> None:
        if sure:
            self.world.crash()

    @precondition(lambda self: RUN in self.world.coordinator.runs)
    @rule(sure=rarely, crash=crashes)
    def someone_closes_the_run(self, sure: bool, crash: Crash | None) -> None:
        if sure:
            self.world.crash_next = crash
            self.world.close_unheard()
            self.ended = self.ended or crash is not Crash.BEFORE_PERSIST

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def remember_until_when_places_bind(self) -> None:
        """A stray node's rule needs it."""
        if self.world.coordinator is not self.coordinator and self.placed:
            self.bound_until = self.world.serves_since + KEEP_ALIVE
        self.coordinator = self.world.coordinator
        self.placed = any(self.has_place(agent) for agent in self.alive)

    @invariant()
    def everyone_knows_its_place(self) -> None:
        self.world.assert_told()

    @invariant()
    def no_round_has_too_many(self) -> None:
        for run in self.world.coordinator.runs.values():
            most = self.world.settings.max_nodes
            count = run.rendezvous.count(NodeStanding.PARTICIPANT)
            assert count <= most
            if run.rendezvous.count(NodeStanding.REDUNDANT):
                assert count == most, "a place is free, and one stands by"

    @invariant()
    def evicted_agent_never_has_a_place(self) -> None:
        for run in self.world.coordinator.runs.values():
            assert not any(node.info.incarnation in run.rendezvous.evictions for node in run.rendezvous)

    @invariant()
    def streams_end_for_good_reasons(self) -> None:
        for agent in self.world.agents:
            for refusal in (*agent.old_refusals, *([agent.refusal] if agent.refusal else [])):
                assert refusal.reason in ENDS, refusal.message

    @invariant()
    def closed_is_sticky(self) -> None:
        closed = self.world.disk.closed(RUN)
        assert self.ended == (closed is not None)
        if closed is not None:
            rendezvous = self.world.rendezvous
            assert self.world.coordinator.runs[RUN].closed == closed
            assert rendezvous.without_round == rendezvous.count(NodeStanding.REDUNDANT) == 0
            for agent in self.alive:
                assert agent.session is None or agent.closed[-1:] == [closed]

    @invariant()
    def who_waits_is_told_often_enough_and_not_too_often(self) -> None:
        for agent in self.alive:
            assert agent.waiting <= len(self.world.agents)

    def teardown(self) -> None:
        """All come back, time passes, and nobody waits for what is there."""
        world = self.world
        for agent in self.alive:
            if agent.session is None and agent.attempt:
                self.come_back(agent)
            if agent.session is None:
                agent.join()
        if self.ended:
            assert all(agent.place is not None for agent in self.alive if agent.session is not None)
            return
        world.wait(LAST_CALL + KEEP_ALIVE)
        if RUN not in world.coordinator.runs:
            return
        rendezvous = world.rendezvous
        here = [agent for agent in self.alive if agent.session is not None]
        world.assert_told()
        if not rendezvous.complete:
            assert len(here) < world.settings.min_nodes, "enough nodes are there, and no round is complete"
            return
        ready = rendezvous.count(NodeStanding.WAITING)
        waiting = ready + rendezvous.evictions.count(rendezvous.round)
        for agent in here:
            if agent.place is not None:
                assert agent.waiting == waiting, "the latest count is told in the end"
                assert agent.lost in (0, len(rendezvous.losses))
                # An evicted node is told of, and does not take part in the next round.
                enough = rendezvous.count(NodeStanding.PARTICIPANT) + ready >= world.settings.min_nodes
                assert bool(agent.lost) == (enough and len(rendezvous.losses) > 0)


TestJob = pytest.mark.timeout(600)(Job.TestCase)  # a failure takes minutes to be made small
TestJob.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
