"""One life of a process that speaks for a rank."""

import math
from dataclasses import dataclass, field

from muster.service.core import report
from muster.service.core.events import SessionId
from muster.service.core.model import MemberState


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
    node_rank: int | None = None
    """The rank of its node in its round, as it said."""
    last_here: float = -math.inf
    """When it was there for certain, on the monotonic clock: at its last hello, or its goodbye. A loss is
    noticed late, and an eviction is another's word. -inf if it was gone before a restart."""
    past: bool = False
    """It may be of a life of the job that is over: it is known, and its rank is waited for all the same."""
    prefixes: set[str] = field(default_factory=set)
    """The groups that it speaks in."""

    def __str__(self) -> str:
        return report.process_name(self.rank, self.host, self.pid)

    def connect(self, session: SessionId, now: float) -> None:
        """It holds a session again."""
        self.session = session
        self.state = MemberState.CONNECTED
        self.past = False
        self.since = self.last_here = now

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
        self.since = self.last_here = now
