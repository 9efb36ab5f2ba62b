"""What the driver must do after a step: first persist the records, then deliver the messages."""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from muster.service.core.vocabulary.events import SessionId
from muster.service.core.vocabulary.model import (
    CheckpointHistory,
    Closed,
    Decision,
    MemberState,
    MissingRank,
    NodeInfo,
    NodeStanding,
    RendezvousSettings,
    Save,
    Shape,
)
from muster.service.core.vocabulary.operations import Answer, Changed
from muster.service.core.vocabulary.refusal import Refusal


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The durable part of a run."""

    run_id: str
    generation: int
    closed: Closed | None = None
    active_at: float | None = None
    """About when it was last used, in seconds since 1970; None if an older version kept it."""


@dataclass(frozen=True, slots=True)
class ForgetRun:
    """Nothing of a run is needed any more: neither its own record nor any other that names it."""

    run_id: str


@dataclass(frozen=True, slots=True)
class EvictionRecord:
    """Up to which ordinal the processes of a rank are refused, in one generation."""

    run_id: str
    rank: int
    generation: int
    ordinal: int


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One completed rendezvous."""

    run_id: str
    round: int
    world_size: int
    completed_at: float
    """Seconds since 1970."""
    join_seconds: float
    """From its first join to its completion."""


@dataclass(frozen=True, slots=True)
class ParticipantRecord:
    """A node that is in the complete round."""

    run_id: str
    node: NodeInfo
    attempt: int
    rank: int
    settings: RendezvousSettings


@dataclass(frozen=True, slots=True)
class ForgetRound:
    """A round's record is not needed any more."""

    run_id: str
    round: int


@dataclass(frozen=True, slots=True)
class ForgetParticipant:
    """A node is in the complete round no more."""

    run_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """The newest save that was asked for of a run."""

    run_id: str
    save: Save


@dataclass(frozen=True, slots=True)
class CheckpointsRecord:
    """The history of a run's saves."""

    run_id: str
    history: CheckpointHistory


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """The durable part of a group; its decisions are records of their own."""

    run_id: str
    prefix: str
    generation: int
    first_sequence: int


@dataclass(frozen=True, slots=True)
class RankOwnerRecord:
    """Which process speaks for a rank in a group, and from which sequence on."""

    run_id: str
    prefix: str
    rank: int
    incarnation: str
    ordinal: int
    host: str
    pid: int
    start_sequence: int
    shape: Shape | int
    """Or the number of the group's :class:`ShapeRecord`, which all ranks that bring this shape share."""
    state: MemberState
    """As it last mattered: unless it is gone, IDLE for one that arrives by unary calls, else DISCONNECTED."""
    lineage: int
    """As that of :class:`~muster.service.core.membership.process.Process`."""
    life: int | None = None
    """The first sequence of the life of the group that it joined. If the group began another since, it
    arrived at the newest release, and may not have heard it. None: the group's newest, as before 0.2.0."""


@dataclass(frozen=True, slots=True)
class ShapeRecord:
    """A shape that ranks of a group brought, once for all of them."""

    run_id: str
    prefix: str
    number: int
    """Names it in the records of its speakers; from 1."""
    shape: Shape


@dataclass(frozen=True, slots=True)
class ForgetShape:
    """A shape's record is not needed any more."""

    run_id: str
    prefix: str
    number: int


@dataclass(frozen=True, slots=True)
class ForgetRankOwner:
    """A speaker's record is not needed any more."""

    run_id: str
    prefix: str
    rank: int


@dataclass(frozen=True, slots=True)
class ForgetDecision:
    """A decision's record is not needed any more."""

    run_id: str
    prefix: str
    sequence: int


@dataclass(frozen=True, slots=True)
class StoreKeyRecord:
    """One key of a run's store."""

    run_id: str
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class ForgetStoreKey:
    """A key was removed from a run's store."""

    run_id: str
    key: str


@dataclass(frozen=True, slots=True)
class StoreOperationRecord:
    """The last change of a store's client, which must not be carried out twice, and its answer."""

    run_id: str
    client: str
    number: int
    answer: Changed
    order: int = 0
    """The number of this change in the run. At the bound, the client with the lowest number is forgotten."""


@dataclass(frozen=True, slots=True)
class ForgetStoreOperation:
    """A store's client is not remembered any more."""

    run_id: str
    client: str


StoredRecord: TypeAlias = (
    RunRecord
    | GroupRecord
    | ShapeRecord
    | RankOwnerRecord
    | Decision
    | EvictionRecord
    | RoundRecord
    | ParticipantRecord
    | SaveRecord
    | CheckpointsRecord
    | StoreKeyRecord
    | StoreOperationRecord
)
Forget: TypeAlias = (
    ForgetRankOwner
    | ForgetShape
    | ForgetDecision
    | ForgetRound
    | ForgetParticipant
    | ForgetStoreKey
    | ForgetStoreOperation
)
Record: TypeAlias = StoredRecord | Forget | ForgetRun


@dataclass(frozen=True, slots=True)
class Welcome:
    """Accepts a Hello."""

    epoch: int
    session_ttl: float
    max_payload_bytes: int
    ordinals: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """What became of one process of an Enter."""

    ordinal: int = 0
    refusal: Refusal | None = None

    def __post_init__(self) -> None:
        if self.refusal is not None:
            self.refusal.forget_origin()


@dataclass(frozen=True, slots=True)
class Entered:
    """Answers an Enter, process by process."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Parted:
    """Answers a Part."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupJoined:
    """Answers a JoinGroup with (rank, first sequence that it may arrive at)."""

    prefix: str
    positions: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """Half of a barrier's timeout has gone."""

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
    """Which rank of the request, since one may speak for several. Without a prefix: its process is sent away
    from a relay's line, which goes on."""
    final: bool = False
    """The session is over; nothing more is said on it."""

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
    """Tells the nodes of a complete round how many wait for the next one."""

    count: int


@dataclass(frozen=True, slots=True)
class NodeLeft:
    """Answers a LeaveRendezvous."""

    had_place: bool


@dataclass(frozen=True, slots=True)
class RunClosed:
    """Answers a CloseRun."""

    closed: Closed
    was_closed: bool


@dataclass(frozen=True, slots=True)
class Evicted:
    """Answers an Evict."""


@dataclass(frozen=True, slots=True)
class RunForgotten:
    """Answers a Forget."""


@dataclass(frozen=True, slots=True)
class SaveAsked:
    """All ranks are to save at one step, or, if it was withdrawn, not to."""

    number: int
    since: int
    """The first barrier of the group whose failure is this request's."""
    stop: bool
    reason: str
    """Who asked, and why, for people."""
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class SaveRequested:
    """Answers a RequestSave or a CancelSave."""

    save: Save
    was_asked: bool = False


@dataclass(frozen=True, slots=True)
class Inspect:
    """Asks what a process is doing."""

    question: int
    all_threads: bool = False


Message: TypeAlias = (
    Welcome
    | Entered
    | Parted
    | GroupJoined
    | Decision
    | Progress
    | Refused
    | Closed
    | Standing
    | RoundComplete
    | NodesWaiting
    | NodeLeft
    | RunClosed
    | Evicted
    | RunForgotten
    | SaveAsked
    | SaveRequested
    | Inspect
    | Answer
)


NO_RANKS: AbstractSet[int] = frozenset()
"""A message is for a session as a whole."""


class Delivery(NamedTuple):
    """One message for every session named."""

    audience: Mapping[SessionId, AbstractSet[int]]
    """Each with the ranks that it concerns; ``NO_RANKS``: they are not told apart."""
    message: Message


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that an operator may want to read in the log."""

    event: str
    run_id: str
    message: str


class ProbeTarget(NamedTuple):
    """A process that is to be asked what it is doing."""

    session: SessionId | None
    """None: it has none, and cannot be asked."""
    rank: int
    incarnation: str
    host: str
    pid: int
    relayed: bool
    """Its session is a relay's line."""


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """People are about to be told of a barrier's missing: ask those who are there what they are doing."""

    run_id: str
    processes: tuple[ProbeTarget, ...]
    ahead: float
    """Seconds until people are told."""


@dataclass(slots=True)
class Effects:
    """All that one step, or a batch of steps, asks for, in order."""

    records: list[Record] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    """The decisions made, for log and metrics."""
    rounds: list[RoundRecord] = field(default_factory=list)
    """The rounds completed, for log and metrics."""
    notices: list[Notice] = field(default_factory=list)
    probes: list[ProbeRequest] = field(default_factory=list)
    """Whom to ask, without waiting for them."""
    forgotten: list[str] = field(default_factory=list)
    """The ids of the runs that are gone, for the metrics."""

    def send(self, session: SessionId, message: Message, ranks: Iterable[int] = ()) -> None:
        """Deliver a message to one session, or to these of its ranks."""
        self.deliveries.append(Delivery({session: frozenset(ranks)}, message))
