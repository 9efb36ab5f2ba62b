"""A relay's stream to the core, as a relay holds it. Clients are added and removed one by one.

The stream checks every message by itself. Each AddProcesses and each RemoveProcesses is answered once and in
order. A message names only ranks of this stream. No client hears a release at which it did not arrive. The
end of one client does not affect the others.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING

from muster.service.core.vocabulary.effects import (
    GroupJoined,
    Message,
    ProcessesAdded,
    ProcessesRemoved,
    Progress,
    Refused,
    SaveAsked,
    Welcome,
)
from muster.service.core.vocabulary.events import (
    AddProcesses,
    Arrival,
    Arrive,
    Disconnected,
    Goodbye,
    Hello,
    JoinGroup,
    RemoveProcesses,
)
from muster.service.core.vocabulary.model import Closed, Decision, Outcome
from muster.service.core.vocabulary.refusal import Reason

if TYPE_CHECKING:
    from tests.support.world.core_client import Client
    from tests.support.world.core_world import World


class RelayStream:
    """One relay's stream to one generation of a run. It opens when the first clients are added."""

    def __init__(self, world: "World", run: str, generation: int = 0, name: str = "node-0 (pid 70)") -> None:
        self.world = world
        self.run = run
        self.generation = generation
        self.name = name
        self.session: int | None = None
        self.broken_sessions: list[int] = []
        """Broken streams that the coordinator has not noticed yet."""
        self.clients: dict[int, Client] = {}
        """The clients of this stream as the coordinator knows them, by rank.

        One may have moved to another stream.
        """
        self.refused: list[Refused] = []
        """The refusals that name no rank."""
        self._being_added: deque[list[Client]] = deque()
        self._being_removed: deque[tuple[int, ...]] = deque()

    def __repr__(self) -> str:
        return f"<relay stream of generation {self.generation}: {self.clients}>"

    # ------------------------------------------------------------------ what it does

    def open(self) -> None:
        """Say hello."""
        assert self.session is None
        self.session = self.world.new_session()
        self.world.relay_streams[self.session] = self
        self.world.do(Hello(self.session, self.run, self.generation, (), self.name))

    def add_processes(self, *clients: "Client") -> None:
        """Add clients with one message. They do not join their groups again by themselves."""
        if self.session is None:
            self.open()
        if self.session is None:
            return  # The coordinator crashed.
        for client in clients:
            assert client.session is None
            client.session, client.relay_stream = self.session, self
            if client.broken_relay_stream is self:
                client.broken_relay_stream = None
        self._being_added.append(list(clients))
        self.world.do(AddProcesses(self.session, tuple(client.info for client in clients)))

    def remove_processes(
        self, *clients: "Client", goodbye: str | None = None, others: tuple[int, ...] = ()
    ) -> None:
        """Remove clients that left or lost their connections. ``others`` are ranks without a client."""
        ranks = tuple(client.rank for client in clients if self.clients.get(client.rank) is client)
        for client in clients:
            client.leave_relay_stream(self)
        for rank in ranks:
            del self.clients[rank]
        if self.session is not None:
            self._being_removed.append((*ranks, *others))
            self.world.do(RemoveProcesses(self.session, (*ranks, *others), goodbye))

    def arrive(self, clients: "Collection[Client]", prefix: str, sequence: int, timeout: float) -> None:
        """Clients arrive at one barrier, all with one message."""
        assert self.session is not None
        arrivals = []
        for client in clients:
            membership = client.memberships[prefix]
            self.world.arriving(client, prefix, membership)
            arrivals.append(Arrival(client.rank, membership.payload, membership.failure, membership.report))
        self.world.do(Arrive(self.session, prefix, sequence, timeout, tuple(arrivals)))

    def join(
        self, clients: "Collection[Client]", prefix: str, size: int, participants: tuple[int, ...]
    ) -> None:
        """Clients join a group, all with one message."""
        assert self.session is not None
        ranks = tuple(client.rank for client in clients)
        self.world.do(JoinGroup(self.session, prefix, size, participants, ranks))
        for client in clients:
            membership = client.memberships[prefix]
            answered = membership.position is not None or membership.refused is not None
            assert answered or client.relay_stream is not self, f"{client} has no answer to its join"

    def goodbye(self) -> None:
        """All leave, and the stream ends."""
        assert self.session is not None
        session, clients = self.session, list(self.clients.values())
        self.world.do(Goodbye(session, "the node is done"))
        for client in clients:
            if client.relay_stream is self:
                client.alive = False
        self.breaks()

    def breaks(self, *, seen: bool = True) -> None:
        """The stream breaks, and the coordinator sees it, or does not yet. It has no clients any more."""
        if self.session is None:
            return
        self.broken_sessions.append(self.session)
        self.world.relay_streams.pop(self.session)
        self.session = None
        for client in (*self.clients.values(), *itertools.chain.from_iterable(self._being_added)):
            client.leave_relay_stream(self)
        self.clients.clear()
        self._being_added.clear()
        self._being_removed.clear()
        if seen:
            self.coordinator_sees_it()

    def coordinator_sees_it(self) -> None:
        """It finds out about the broken streams."""
        broken, self.broken_sessions = self.broken_sessions, []
        for session in broken:
            self.world.do(Disconnected(session))

    @property
    def unanswered(self) -> bool:
        """Whether an AddProcesses or a RemoveProcesses has no answer yet."""
        return bool(self._being_added or self._being_removed)

    # ------------------------------------------------------------------ what it hears

    def hear(self, message: Message, ranks: Collection[int]) -> None:
        match message:
            case Welcome():
                assert message.ordinals == ()
            case ProcessesAdded():
                self._hear_added(message)
            case ProcessesRemoved():
                assert message.ranks == self._being_removed.popleft(), (
                    "each RemoveProcesses is answered, in order"
                )
            case GroupJoined():
                for position in message.positions:
                    self._deliver(position[0], GroupJoined(message.prefix, (position,)))
            case Decision() | Progress() | Closed() | SaveAsked():
                assert ranks, "a message to a relay names its ranks"
                for rank in sorted(ranks):
                    self._deliver(rank, message)
            case Refused(rank=None):
                self.refused.append(message)
                if message.final:
                    self.breaks()
            case Refused(rank=int(rank)) if message.prefix:
                self._deliver(rank, message)
            case Refused(rank=int(rank)):
                self._hear_refused_rank(rank, message)

    def _deliver(self, rank: int, message: Message) -> None:
        """Hand a message on, if its client has not gone to another stream meanwhile."""
        assert rank in self.clients, f"rank {rank} is not on {self}: {message}"
        client = self.clients[rank]
        if isinstance(message, Decision) and message.outcome is Outcome.RELEASED:
            assert client.arrived_at(message.prefix, message.sequence), f"{client} did not arrive: {message}"
        if client.relay_stream is self:
            client.hear(message)

    def _hear_added(self, message: ProcessesAdded) -> None:
        clients = self._being_added.popleft()
        assert len(message.entries) == len(clients), "each process of an AddProcesses is answered, in order"
        named: set[int] = set()
        for client, entry in zip(clients, message.entries, strict=True):
            holder, again = self.clients.get(client.rank), client.rank in named
            named.add(client.rank)
            if entry.refusal is None:
                assert holder in (None, client), "two processes act for one rank on one stream"
                self.clients[client.rank] = client
                client.hear(Welcome(0, 0.0, 0, (entry.ordinal,)))
                continue
            assert entry.ordinal == 0
            if client.relay_stream is self and holder is not client:
                client.leave_relay_stream(self)
                if entry.refusal.reason is Reason.INVALID_ARGUMENT:
                    assert again or holder is not None, entry.refusal.message
                else:
                    client.hear(Refused(entry.refusal, final=True))

    def _hear_refused_rank(self, rank: int, refused: Refused) -> None:
        assert not refused.final, "a refusal of one rank does not end the stream"
        assert rank in self.clients, f"rank {rank} is refused, and is not on {self}"
        client = self.clients.pop(rank)
        if client.relay_stream is self:
            assert refused.refusal.reason is Reason.EVICTED, "a client on this stream has no other session"
            client.leave_relay_stream(self)
            client.hear(dataclasses.replace(refused, final=True))
        else:
            client.leave_relay_stream(self)
