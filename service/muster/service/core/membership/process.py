"""A process of a rank: its identity and its state."""

import math
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from muster.service.core.membership.outage import Absence, Outage
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.effects import NO_RANKS, Delivery, Effects
from muster.service.core.vocabulary.model import Decision, MemberState, Observation, SessionId, Step

SUCCESSION_WINDOW = 60.0
"""Seconds in which a new process may take over the groups of a dead process of its rank. The time starts at
its first hello, and again when an older process of its rank comes back. A process that has taken over no
group by then is a helper, and barriers do not wait for it in place of the dead process."""

VERBS = {
    MemberState.LEFT: "left",
    MemberState.LOST: "was lost",
    MemberState.IDLE: "has not called for long",
    MemberState.EVICTED: "was evicted",
}
"""What became of a process, for people."""


@dataclass(slots=True, kw_only=True, eq=False)
class Process:
    """One incarnation of a process."""

    run_id: str
    rank: int
    incarnation: str
    ordinal: int
    """Its order among the incarnations of its rank, by first hello."""
    host: str
    pid: int
    node_name: str
    """The name of its node as the scheduler knows it."""
    generation: int
    unary: bool
    """It arrives by unary calls, so the end of a call does not end it."""
    session: SessionId | None
    state: MemberState
    since: float
    """When it entered its state, on the monotonic clock."""
    relay: str = ""
    """The relay of its session, or of its last one; empty: a stream of its own."""
    node_rank: int | None = None
    """The rank of its node in its round, as it reported it."""
    absence: Absence | None = None
    """Its time to come back; None: it was never disconnected, or is back."""
    last_seen: float = -math.inf
    """When it certainly existed, on the monotonic clock: at its last hello, or its goodbye. The coordinator
    notices a loss late, so that does not count. -inf if it was gone before a restart."""
    lineage: int
    """Shared by the processes of its rank that took over groups from one another: their lowest ordinal. A
    restart of the coordinator forgets it of a process that owns no group."""
    past: bool = False
    """It may belong to an earlier start of the job. It stays known, and barriers still wait for its rank."""
    successor_until: float | None = None
    """Until when it may take over the groups of any dead process of its rank, on the monotonic clock. None:
    no longer, or its rank had no other process at its first hello."""
    prefixes: set[str] = field(default_factory=set)
    """The groups in which it owns its rank."""
    observation: Observation | None = None
    """What it was last observed doing."""
    step: Step | None = None
    """The training step that it last reported."""

    def __str__(self) -> str:
        return report.process_name(self.rank, self.host, self.pid)

    @property
    def back_by(self) -> float:
        """Until when it may come back while it is disconnected, on the monotonic clock."""
        return -math.inf if self.absence is None else self.absence.ends

    def connect(self, session: SessionId, now: float, relay: str = "") -> None:
        """Connect it to a session, perhaps through a relay."""
        if self.absence is not None:
            self.absence.over(now)
            self.absence = None
        self.session = session
        self.relay = relay
        self.state = MemberState.CONNECTED
        self.past = False
        self.since = self.last_seen = now

    def disconnect(self, now: float, grace: float, longest: float, outage: Outage) -> None:
        """Record that its session broke.

        Args:
            now: the time, on the monotonic clock.
            grace: seconds that it may take to come back.
            longest: the same, while others of its outage are coming back.
            outage: the one in which it lost its session.
        """
        self.session = None
        self.state = MemberState.DISCONNECTED
        self.since = now
        self.absence = Absence(now + grace, now + longest, outage)

    def expire(self) -> None:
        """Record that it did not come back in time. ``since`` stays the time of the loss."""
        self.state = MemberState.IDLE if self.unary else MemberState.LOST

    def evict(self, now: float) -> None:
        """Record that it was evicted."""
        self.session = None
        self.state = MemberState.EVICTED
        self.since = now

    def leave(self, now: float) -> None:
        """Record that it said goodbye."""
        self.session = None
        self.state = MemberState.LEFT
        self.since = self.last_seen = now


def audience(processes: Iterable[Process]) -> dict[SessionId, AbstractSet[int]]:
    """Return the sessions of connected processes, each once. A relay's session comes with the ranks."""
    sessions: dict[SessionId, AbstractSet[int]] = {}
    relayed: dict[SessionId, set[int]] = {}
    for process in processes:
        if process.session is None:
            continue
        if process.relay:
            relayed.setdefault(process.session, set()).add(process.rank)
        else:
            sessions[process.session] = NO_RANKS
    sessions.update(relayed)
    return sessions


def answer(process: Process, decision: Decision, effects: Effects) -> None:
    """Send a decision to a process that asks for it. A relay that asks for several ranks gets it once."""
    assert process.session is not None
    if effects.deliveries and effects.deliveries[-1].message is decision:
        ranks = effects.deliveries[-1].audience.get(process.session)
        if isinstance(ranks, set):
            ranks.add(process.rank)
            return
    effects.deliveries.append(Delivery(audience((process,)), decision))
