"""Nodes around the core's rendezvous, on the disk and the streams of :mod:`tests.support.world.core_world`.

``Agent`` behaves as the SDK does. It reconnects to its place with its attempt and round, and asks for a new
round with the next attempt. When it hears that it was removed, it takes a new incarnation.

The world checks some invariants at every step of every test. An announced round is on disk. Its members
never change, and have the ranks 0 to n-1, with n from ``min_nodes`` to ``max_nodes``. A node whose stream was
lost is not in a round that has just been completed.
"""

from dataclasses import dataclass

from muster.service.core.rendezvous.rendezvous import Rendezvous
from muster.service.core.retention.retention import FOR_EVER, Retention
from muster.service.core.vocabulary.effects import (
    Effects,
    Message,
    NodeLeft,
    NodesWaiting,
    Refused,
    RoundComplete,
    RoundStopped,
    RunClosed,
    Standing,
)
from muster.service.core.vocabulary.events import (
    CloseRun,
    Disconnected,
    Event,
    JoinRendezvous,
    LeaveRendezvous,
)
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import Closed, NodeInfo, NodeStanding, RendezvousSettings
from muster.service.core.vocabulary.records import ParticipantRecord, RoundRecord
from muster.service.core.vocabulary.refusal import Reason, Refusal
from tests.support.world.core_world import RUN, World

JOIN = 600.0
LAST_CALL = 30.0
KEEP_ALIVE = 15.0


def nodes(fewest: int, most: int = 0, **changed: float) -> RendezvousSettings:
    """What a node asks for."""
    times = {"join_timeout": JOIN, "last_call_timeout": LAST_CALL, "keep_alive_timeout": KEEP_ALIVE}
    return RendezvousSettings(min_nodes=fewest, max_nodes=most or fewest, **(times | changed))


@dataclass(eq=False)
class Stream:
    """One stream of an agent, from the side of the world."""

    agent: "Agent"
    session: int
    memberships: dict[str, object]
    """None: an agent takes part in no barrier."""

    def hear(self, message: Message) -> None:
        self.agent.hear(self.session, message)

    def stream_breaks(self) -> None:
        self.agent.breaks(self.session)


class Agent:
    """One torchrun: what it asks, and what it was told."""

    def __init__(
        self, world: "RendezvousWorld", address: str, settings: RendezvousSettings, run: str, incarnation: str
    ) -> None:
        self.world = world
        self.address = address
        self.settings = settings
        self.run = run
        self.incarnation = incarnation
        self.pid = 100 + world.count()
        self.attempt = 0
        self.session: int | None = None
        self.unseen: list[int] = []
        """Streams that are gone, of which the coordinator does not know yet."""
        self.place: RoundComplete | None = None
        self.standing: Standing | None = None
        self.waits_since: float | None = None
        """Since when a coordinator has counted its join timeout."""
        self.rounds: list[RoundComplete] = []
        """Every round that it was told, each once."""
        self.waiting = 0
        self.lost = 0
        self.told_waiting: list[tuple[float, int]] = []
        """When it was told how many wait."""
        self.closed: list[Closed] = []
        self.stopped: list[RoundStopped] = []
        self.refusal: Refusal | None = None
        """What ended its last stream."""
        self.old_refusals: list[Refusal] = []
        """What ended streams that it did not use any more."""

    def __repr__(self) -> str:
        return f"<{self.address} as {self.incarnation}, attempt {self.attempt}>"

    @property
    def info(self) -> NodeInfo:
        return NodeInfo(self.incarnation, self.address, self.pid)

    # ------------------------------------------------------------------ what it does

    def join(self, *, seen: bool = True) -> None:
        """Ask for a new round; it leaves its old stream, and the coordinator may be late to see it."""
        self.attempt += 1
        self.place = self.standing = self.refusal = self.waits_since = None
        self.waiting = self.lost = 0
        self.lose_stream(seen=seen)
        self.connect()

    def connect(self) -> None:
        """Open a stream for the attempt that it has made."""
        self.session = self.world.open_node_session(self)
        self.world.do(self.ask())

    def ask(self, **changed: object) -> JoinRendezvous:
        fields: dict[str, object] = {
            "session": self.session,
            "run_id": self.run,
            "node": self.info,
            "attempt": self.attempt,
            "settings": self.settings,
            "round": self.place.round if self.place is not None else None,
            "waited": self.world.now - self.waits_since if self.waits_since is not None else 0.0,
        }
        return JoinRendezvous(**(fields | changed))  # type: ignore[arg-type]

    def lose_stream(self, *, seen: bool = True) -> None:
        """The stream breaks; the coordinator sees it, or not yet."""
        if self.session is not None:
            self.breaks(self.session)
        if seen:
            self.coordinator_sees_it()

    def breaks(self, session: int) -> None:
        self.world.streams.pop(session, None)
        self.unseen.append(session)
        if session == self.session:
            self.session = None

    def coordinator_sees_it(self) -> None:
        """It finds out about every broken stream."""
        unseen, self.unseen = self.unseen, []
        for session in unseen:
            self.world.do(Disconnected(session))

    def leave(self, reason: str = "") -> bool:
        """Give the place up. Returns whether it had one."""
        (answer,) = (d.message for d in self.leave_unheard(reason).deliveries if type(d.message) is NodeLeft)
        assert isinstance(answer, NodeLeft)
        return answer.had_place

    def leave_unheard(self, reason: str = "") -> Effects:
        """Give the place up, though the coordinator may be killed before it answers."""
        self.lose_stream()
        self.place = self.standing = None
        event = LeaveRendezvous(self.world.new_session(), self.run, self.incarnation, reason)
        return self.world.do(event)

    # ------------------------------------------------------------------ what it hears

    def hear(self, session: int, message: Message) -> None:
        if isinstance(message, Refused):
            self._hear_end(session, message)
            return
        assert session == self.session, "only an end is told on a stream that is replaced"
        match message:
            case Standing():
                assert self.place is None, "a round that was told is not taken back"
                self.standing = message
                stands_by = message.standing is NodeStanding.REDUNDANT
                self.waits_since = None if stands_by else self.waits_since or self.world.now
            case RoundComplete():
                self.world.judge_round(self, message)
                if message not in self.rounds:
                    self.rounds.append(message)
                self.place, self.standing, self.waits_since = message, None, None
            case NodesWaiting():
                assert self.place is not None, "only nodes of a round are told who waits"
                self.waiting, self.lost = message.count, message.lost
                self.told_waiting.append((self.world.now, message.count))
            case RoundStopped():
                assert self.place is not None, "only nodes of a round are told that it was stopped"
                self.stopped.append(message)
            case Closed():
                assert self.world.disk.closed(self.run) == message, "it is told before it is on disk"
                self.closed.append(message)
            case _:
                raise AssertionError(f"not for a node: {message!r}")

    def _hear_end(self, session: int, refused: Refused) -> None:
        assert refused.final
        assert refused.refusal.message
        if session == self.session:
            self.refusal = refused.refusal
            if refused.refusal.reason is Reason.NODE_REMOVED:
                self.incarnation = f"{self.address}.{self.world.count()}"
                self.place = self.standing = None
        else:
            self.old_refusals.append(refused.refusal)
        self.breaks(session)
        self.coordinator_sees_it()

    # ------------------------------------------------------------------ for assertions

    @property
    def reason(self) -> Reason | None:
        """Why its stream ended."""
        return self.refusal.reason if self.refusal is not None else None

    @property
    def stands(self) -> NodeStanding | None:
        """How it stands, as it was told, before it has a round."""
        return self.standing.standing if self.standing is not None else None

    @property
    def rank(self) -> int | None:
        """Its rank in the round that it heard."""
        return self.place.rank if self.place is not None else None


class RendezvousWorld(World):
    """One coordinator, and the nodes of its runs."""

    def __init__(
        self,
        settings: RendezvousSettings | None = None,
        *,
        limits: Limits | None = None,
        retention: Retention = FOR_EVER,
    ) -> None:
        self.agents: list[Agent] = []
        self.settings = settings or nodes(2)
        self.sent_rounds: dict[tuple[str, int], dict[str, RoundComplete]] = {}
        """What was ever told of a round, by incarnation."""
        self.present: dict[str, int] = {}
        """The stream that the coordinator knows to be open, by incarnation."""
        super().__init__(limits=limits, retention=retention)

    # ------------------------------------------------------------------ the coordinator

    @property
    def rendezvous(self) -> Rendezvous:
        return self.coordinator.runs[RUN].rendezvous

    def crash(self) -> None:
        super().crash()
        self.present.clear()
        for agent in self.agents:
            agent.unseen.clear()

    def do(self, *events: Event) -> Effects:
        for event in events:
            if isinstance(event, JoinRendezvous):
                self.present[event.node.incarnation] = event.session
            elif isinstance(event, Disconnected):
                self.present = {name: s for name, s in self.present.items() if s != event.session}
        present = set(self.present)
        effects = super().do(*events)
        changed = [one for one in effects.records if isinstance(one, ParticipantRecord)]
        completed = [one for one in changed if not one.lost]
        lost = [one.node for one in completed if one.node.incarnation not in present]
        assert not lost, f"a round is completed with nodes whose streams are lost: {lost}"
        return effects

    def open_node_session(self, agent: Agent) -> int:
        session = self.new_session()
        self.streams[session] = Stream(agent, session, {})  # type: ignore[assignment]
        return session

    # ------------------------------------------------------------------ nodes

    def agent(
        self,
        address: str,
        settings: RendezvousSettings | None = None,
        *,
        run: str = RUN,
        incarnation: str = "",
        join: bool = True,
    ) -> Agent:
        """Start an agent, which joins."""
        name = incarnation or f"{address}.{self.count()}"
        agent = Agent(self, address, settings or self.settings, run, name)
        self.agents.append(agent)
        if join:
            agent.join()
        return agent

    def several(self, *addresses: str) -> list[Agent]:
        return [self.agent(address) for address in addresses]

    def judge_round(self, agent: Agent, completed: RoundComplete) -> None:
        """Hold what a node is told of a round against the disk, and against what others were told."""
        settings = agent.settings
        assert settings.min_nodes <= completed.world_size <= settings.max_nodes
        assert 0 <= completed.rank < completed.world_size
        (record,) = (one for one in self.disk.rounds[agent.run] if one.round == completed.round)
        assert record.world_size == completed.world_size
        key = (agent.run, agent.incarnation, agent.attempt, completed.rank)
        assert key in self.disk.places, "it is told before it is on disk"
        others = self.sent_rounds.setdefault((agent.run, completed.round), {})
        assert others.get(agent.incarnation, completed) == completed, (
            "a round is told differently the second time"
        )
        others[agent.incarnation] = completed
        assert len({one.rank for one in others.values()}) == len(others), "two nodes have one rank"
        assert len({one.world_size for one in others.values()}) == 1

    def close(
        self, by: str = "node-0", reason: str = "", *, abort: bool = False, run: str = RUN
    ) -> RunClosed:
        """Someone closes the run."""
        (answer,) = self.ask(CloseRun(self.new_session(), run, by, reason, abort))
        assert isinstance(answer, RunClosed)
        return answer

    def close_unheard(self) -> None:
        """Someone closes the run, though the coordinator may be killed before it answers."""
        self.do(CloseRun(self.new_session(), RUN, f"someone-{self.count()}", "", False))

    # ------------------------------------------------------------------ for assertions

    @property
    def completed(self) -> list[RoundRecord]:
        """Every round that was ever completed."""
        return self.disk.rounds.get(RUN, [])

    def assert_told(self) -> None:
        """Every agent whose stream is open knows its place, and the coordinator knows the same."""
        for agent in self.agents:
            run = self.coordinator.runs.get(agent.run)
            if agent.session is None or run is None:
                continue
            node = run.rendezvous.find(agent.incarnation)
            assert node is not None, f"{agent} holds a stream without a place"
            assert (node.session, node.attempt) == (agent.session, agent.attempt)
            if run.rendezvous.complete and node.standing is NodeStanding.PARTICIPANT:
                size = run.rendezvous.rounds[-1].world_size
                assert node.rank is not None
                assert agent.place == RoundComplete(run.rendezvous.round, node.rank, size)
            else:
                assert agent.place is None
                assert agent.stands is node.standing

    def ranks_of(self, *agents: Agent) -> list[int | None]:
        """Their ranks, as they were told."""
        return [agent.rank for agent in agents]


def formed(*names: str, fewest: int = 2, most: int = 2) -> RendezvousWorld:
    """A world with an agent on each node that is named; the first ones are in round 0."""
    world = RendezvousWorld(nodes(fewest, most))
    world.several(*names)
    world.wait(LAST_CALL)
    return world
