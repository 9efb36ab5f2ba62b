"""What the driver must do after a step: persist the records first, then deliver the messages."""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from muster.service.core.vocabulary.local import LocalMessage
from muster.service.core.vocabulary.model import (
    Closed,
    Decision,
    MissingRank,
    NodeStanding,
    Save,
    SessionId,
    Stopped,
)
from muster.service.core.vocabulary.operations import Answer
from muster.service.core.vocabulary.records import Record, RoundRecord
from muster.service.core.vocabulary.refusal import Refusal


@dataclass(frozen=True, slots=True)
class Welcome:
    """Accepts a Hello."""

    epoch: int
    session_ttl: float
    max_payload_bytes: int
    ordinals: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """The result for one process of an AddProcesses."""

    ordinal: int = 0
    refusal: Refusal | None = None

    def __post_init__(self) -> None:
        if self.refusal is not None:
            self.refusal.forget_origin()


@dataclass(frozen=True, slots=True)
class ProcessesAdded:
    """Answers an AddProcesses, process by process."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class ProcessesRemoved:
    """Answers a RemoveProcesses."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupJoined:
    """Answers a JoinGroup with (rank, first sequence that it may arrive at)."""

    prefix: str
    positions: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """Tells waiting ranks which ranks are missing."""

    prefix: str
    sequence: int
    arrived: int
    required: int
    missing: tuple[MissingRank, ...]
    message: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A request of a session was not carried out."""

    refusal: Refusal
    prefix: str = ""
    sequence: int | None = None
    rank: int | None = None
    """The rank of the request that was refused. Without a prefix, its process is removed from a relay's
    stream, which stays open."""
    final: bool = False
    """The session is over; this is its last message."""

    def __post_init__(self) -> None:
        self.refusal.forget_origin()


@dataclass(frozen=True, slots=True)
class Standing:
    """Tells a node its place in the rendezvous."""

    standing: NodeStanding
    round: int
    message: str


@dataclass(frozen=True, slots=True)
class RoundComplete:
    """Tells a node its rank in a round."""

    round: int
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class NodesWaiting:
    """Tells the nodes of a complete round why they end it."""

    count: int
    """How many nodes wait for the next round or were evicted from this one."""
    lost: int = 0
    """How many nodes it has lost, if the next round can form without them."""


@dataclass(frozen=True, slots=True)
class RoundStopped:
    """Tells the nodes of a round that their run was stopped, and how many of them have gone."""

    stopped: Stopped
    nodes_gone: int


@dataclass(frozen=True, slots=True)
class NodeLeft:
    """Answers a LeaveRendezvous."""

    had_place: bool


@dataclass(frozen=True, slots=True)
class RunClosed:
    """Answers a CloseRun."""

    closed: Closed | None
    """None: the run was stopped, and is not closed."""
    was_closed: bool
    stopped: Stopped | None = None


@dataclass(frozen=True, slots=True)
class Evicted:
    """Answers an Evict or an EvictNode."""


@dataclass(frozen=True, slots=True)
class RunForgotten:
    """Answers a Forget."""


@dataclass(frozen=True, slots=True)
class SaveAsked:
    """Tells all ranks to save at one step, or that this request was withdrawn."""

    number: int
    since: int
    """The first barrier of the group whose failure is this request's."""
    stop: bool
    reason: str
    """The requester and the reason, for people."""
    withdrawn: bool = False
    """Whether nothing is to be done for it: it is done, was withdrawn or has lapsed."""
    seconds_left: float | None = None
    """Seconds until the save must be complete, at least 0; None: it has no deadline."""


@dataclass(frozen=True, slots=True)
class SaveRequested:
    """Answers a RequestSave or a CancelSave."""

    save: Save
    was_asked: bool = False


class DrainedRun(NamedTuple):
    """One run on a node that is drained."""

    run_id: str
    save: Save
    was_asked: bool


@dataclass(frozen=True, slots=True)
class NodeDrained:
    """Answers a DrainNode: the runs that have something on the node."""

    runs: tuple[DrainedRun, ...]


@dataclass(frozen=True, slots=True)
class Inspect:
    """Asks what a process is doing."""

    question: int
    all_threads: bool = False


Message: TypeAlias = (
    Welcome
    | ProcessesAdded
    | ProcessesRemoved
    | GroupJoined
    | Decision
    | Progress
    | Refused
    | Closed
    | Standing
    | RoundComplete
    | NodesWaiting
    | RoundStopped
    | NodeLeft
    | RunClosed
    | Evicted
    | RunForgotten
    | SaveAsked
    | SaveRequested
    | NodeDrained
    | Inspect
    | Answer
    | LocalMessage
)


NO_RANKS: AbstractSet[int] = frozenset()
"""The audience of a message to a whole session."""


class Delivery(NamedTuple):
    """One message for every session named."""

    audience: Mapping[SessionId, AbstractSet[int]]
    """Each with the ranks that the message is for; ``NO_RANKS``: the whole session."""
    message: Message


@dataclass(frozen=True, slots=True)
class Notice:
    """An entry of the log, for operators."""

    event: str
    run_id: str
    message: str


class ProbeTarget(NamedTuple):
    """A process to ask what it is doing."""

    session: SessionId | None
    """None: it has no session and cannot be asked."""
    rank: int
    incarnation: str
    host: str
    pid: int
    relayed: bool
    """Its session is a relay's stream."""


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """Asks the connected missing ranks of a barrier what they are doing, before people are told."""

    run_id: str
    processes: tuple[ProbeTarget, ...]
    ahead: float
    """Seconds until the report."""


@dataclass(slots=True)
class Effects:
    """Everything that one step, or a batch of steps, causes, in order."""

    records: list[Record] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    """The decisions made, for log and metrics."""
    rounds: list[RoundRecord] = field(default_factory=list)
    """The rounds completed, for log and metrics."""
    notices: list[Notice] = field(default_factory=list)
    probes: list[ProbeRequest] = field(default_factory=list)
    """Processes to probe; no step waits for the answers."""
    forgotten: list[str] = field(default_factory=list)
    """Ids of removed runs, for the metrics."""

    def send(self, session: SessionId, message: Message, ranks: Iterable[int] = ()) -> None:
        """Deliver a message to one session, or to some of its ranks."""
        self.deliveries.append(Delivery({session: frozenset(ranks)}, message))
