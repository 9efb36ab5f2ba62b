"""One life of a process that speaks for a rank."""

import math
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.effects import NO_RANKS, Delivery, Effects
from muster.service.core.vocabulary.events import SessionId
from muster.service.core.vocabulary.model import Decision, MemberState, Observation, Step

SUCCESSION_WINDOW = 60.0
"""Seconds after its first hello, or that of an older process of its rank that comes back from an earlier
life, in which a process may take over the groups of a dead process of its rank. One that has taken over none
by then is a helper: nobody waits for it in place of the dead one."""


@dataclass(slots=True, kw_only=True, eq=False)
class Process:
    """An incarnation: who it is, and how it stands."""

    run_id: str
    rank: int
    incarnation: str
    ordinal: int
    """Its order among the incarnations of its rank, by first hello."""
    host: str
    pid: int
    generation: int
    unary: bool
    """It arrives by unary calls, so the end of a call is not the end of its life."""
    session: SessionId | None
    state: MemberState
    since: float
    """When it came to stand so, on the monotonic clock."""
    relay: str = ""
    """Whose line its session is, or was last; empty: a stream of its own."""
    node_rank: int | None = None
    """The rank of its node in its round, as it said."""
    last_seen: float = -math.inf
    """When it was there for certain, on the monotonic clock: at its last hello, or its goodbye. A loss is
    noticed late, and an eviction is another's word. -inf if it was gone before a restart."""
    lineage: int
    """The lowest ordinal among the processes of its rank that took over groups from one another. They share
    it."""
    past: bool = False
    """It may be of a life of the job that is over: it is known, and its rank is waited for all the same."""
    successor_until: float | None = None
    """Until when it may take over the groups of any dead process of its rank, on the monotonic clock; None:
    no more, or its rank had no other process at its first hello."""
    prefixes: set[str] = field(default_factory=set)
    """The groups that it speaks in."""
    observation: Observation | None = None
    """What it was last seen doing."""
    step: Step | None = None
    """The training step that it is at, if it tells that."""

    def __str__(self) -> str:
        return report.process_name(self.rank, self.host, self.pid)

    def connect(self, session: SessionId, now: float, relay: str = "") -> None:
        """It holds a session again, perhaps through a relay."""
        self.session = session
        self.relay = relay
        self.state = MemberState.CONNECTED
        self.past = False
        self.since = self.last_seen = now

    def disconnect(self, now: float) -> None:
        """Its session broke; it has the session TTL to come back."""
        self.session = None
        self.state = MemberState.DISCONNECTED
        self.since = now

    def expire(self) -> None:
        """It did not come back in time. ``since`` stays: the connection was lost then."""
        self.state = MemberState.IDLE if self.unary else MemberState.LOST

    def evict(self, now: float) -> None:
        """It was sent away."""
        self.session = None
        self.state = MemberState.EVICTED
        self.since = now

    def leave(self, now: float) -> None:
        """It said goodbye."""
        self.session = None
        self.state = MemberState.LEFT
        self.since = self.last_seen = now


def audience(processes: Iterable[Process]) -> dict[SessionId, AbstractSet[int]]:
    """The sessions of those who are connected, each once: a relay's with the ranks of those who are named."""
    sessions: dict[SessionId, AbstractSet[int]] = {}
    lines: dict[SessionId, set[int]] = {}
    for process in processes:
        if process.session is None:
            continue
        if process.relay:
            lines.setdefault(process.session, set()).add(process.rank)
        else:
            sessions[process.session] = NO_RANKS
    sessions.update(lines)
    return sessions


def answer(process: Process, decision: Decision, effects: Effects) -> None:
    """Tell a decision to one who asks for it; once to a relay that asks for several of its ranks."""
    assert process.session is not None
    if effects.deliveries and effects.deliveries[-1].message is decision:
        ranks = effects.deliveries[-1].audience.get(process.session)
        if isinstance(ranks, set):
            ranks.add(process.rank)
            return
    effects.deliveries.append(Delivery(audience((process,)), decision))
