"""The nodes of a rendezvous, their places, and the nodes that departed."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from muster.service.core.membership.outage import Absence, Outage
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.model import NodeInfo, NodeStanding, RendezvousSettings, SessionId
from muster.service.core.vocabulary.records import ParticipantRecord

TIMED_OUT = "timed out"
"""Why a node departed that got no round within its join timeout."""
TIMED_OUT_TOGETHER = 1.0
"""Seconds within which nodes that time out count as having waited together."""


@dataclass(slots=True, eq=False)
class Node:
    """One incarnation of an agent, and its place."""

    info: NodeInfo
    attempt: int
    settings: RendezvousSettings
    session: SessionId | None
    since: float
    """When its stream was opened or lost, on the monotonic clock."""
    joined_at: float
    """When it started to wait for a round, on the monotonic clock; perhaps under an earlier coordinator."""
    arrival: int
    """Its order among all joins."""
    standing: NodeStanding = NodeStanding.PARTICIPANT
    rank: int | None = None
    """In the complete round."""
    absence: Absence | None = None
    """Its time to come back; None: it has a stream."""

    def __str__(self) -> str:
        return report.node_name(self.info)

    def record(self, run_id: str, *, lost: bool = False) -> ParticipantRecord:
        """Return its record in a complete round.

        Args:
            run_id: the run.
            lost: whether the round has lost it.
        """
        assert self.rank is not None
        return ParticipantRecord(run_id, self.info, self.attempt, self.rank, self.settings, lost)

    @property
    def back_by(self) -> float:
        """Until when it may come back if it has no stream, on the monotonic clock."""
        return math.inf if self.absence is None else self.absence.ends

    def wait_back(self, grace: float | None, now: float, outage: Outage) -> None:
        """Wait for another stream of it.

        Args:
            grace: seconds, if that is less than its keep-alive timeout; None: the keep-alive timeout.
            now: the time, on the monotonic clock.
            outage: the one in which it lost its stream.
        """
        self.session = None
        self.since = now
        longest = self.settings.keep_alive_timeout
        usual = longest if grace is None else min(grace, longest)
        self.absence = Absence(now + usual, now + longest, outage)

    def connect(self, session: SessionId, now: float) -> None:
        """Connect it to another stream."""
        if self.absence is not None:
            self.absence.over(now)
            self.absence = None
        self.session = session
        self.since = now


@dataclass(frozen=True, slots=True)
class Departed:
    """A node that lost or gave up its place."""

    info: NodeInfo
    round: int
    reason: str
    at: float
    """On the monotonic clock."""

    def timed_out_just_now(self, round: int, now: float) -> bool:
        """Whether it timed out in this round so recently that reports still count it as waiting."""
        return (self.round, self.reason) == (round, TIMED_OUT) and now - self.at < TIMED_OUT_TOGETHER


@dataclass(slots=True)
class Places:
    """The nodes that have a place, by incarnation, in the order in which they took it."""

    participants: dict[str, Node] = field(default_factory=dict)
    waiting: dict[str, Node] = field(default_factory=dict)
    redundant: dict[str, Node] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Node]:
        for standing in NodeStanding:
            yield from self.of(standing).values()

    def __len__(self) -> int:
        return sum(len(self.of(standing)) for standing in NodeStanding)

    def find(self, incarnation: str) -> Node | None:
        """Return the node of this incarnation, if it has a place."""
        return next((one for s in NodeStanding if (one := self.of(s).get(incarnation)) is not None), None)

    def accept_round(self) -> bool:
        """Whether every participant accepts a round of all of them, and has an open stream."""
        count = len(self.participants)
        return all(
            node.session is not None and node.settings.min_nodes <= count <= node.settings.max_nodes
            for node in self.participants.values()
        )

    def of(self, standing: NodeStanding) -> dict[str, Node]:
        """Return the nodes with a standing."""
        match standing:
            case NodeStanding.PARTICIPANT:
                return self.participants
            case NodeStanding.WAITING:
                return self.waiting
            case NodeStanding.REDUNDANT:
                return self.redundant


def assign_ranks(nodes: Iterable[Node], before: Mapping[str, int]) -> None:
    """Give each node of a round its rank.

    A node keeps its rank of the round before if that rank exists in this round. The other nodes get the free
    ranks in order of their address, then of their join.

    Args:
        nodes: the nodes of the round.
        before: the ranks of the round before, by incarnation.
    """
    nodes = list(nodes)
    free = dict.fromkeys(range(len(nodes)))
    newcomers: list[Node] = []
    for node in nodes:
        rank = before.get(node.info.incarnation)
        if rank in free:
            del free[rank]
            node.rank = rank
        else:
            newcomers.append(node)
    newcomers.sort(key=lambda node: (natural(node.info.address), node.arrival))
    for node, rank in zip(newcomers, free, strict=True):
        node.rank = rank


def natural(address: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts ``node-2`` before ``node-10``, and ``10.0.0.2`` before ``10.0.0.10``."""
    parts = re.split(r"([0-9]+)", address)
    return [(0, int(part), "") if part.isdecimal() and part.isascii() else (1, 0, part) for part in parts]
