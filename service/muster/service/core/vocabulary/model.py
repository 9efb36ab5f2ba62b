"""The data types of the core: outcomes, shapes, missing ranks and decisions.

Enum values are the numbers of ``muster.v1``, so that the wire needs no second table.
"""

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import NamedTuple, TypeAlias

SessionId: TypeAlias = int
"""Names one open stream, or one unary call, for as long as it lasts."""


class Instant(NamedTuple):
    """One moment, as the driver hands it in."""

    monotonic: float
    """Seconds on a clock that never jumps. All deadlines are on this clock."""
    wall: float
    """Seconds since 1970, for people. It decides nothing."""


class Outcome(enum.IntEnum):
    """The outcome of a barrier."""

    RELEASED = 1
    TIMED_OUT = 2
    ABORTED = 3
    MEMBER_LOST = 4
    MISMATCHED = 5


class MissingState(enum.IntEnum):
    """Why a rank is missing from a barrier."""

    NEVER_JOINED = 1
    NOT_ARRIVED = 2
    CONNECTION_LOST = 3
    LEFT = 4
    EVICTED = 5


class MemberState(enum.IntEnum):
    """The state of a process."""

    CONNECTED = 1
    DISCONNECTED = 2
    LOST = 3
    LEFT = 4
    IDLE = 5
    EVICTED = 6

    living: bool
    """Whether it is connected, or may still come back to its session."""
    gone: bool
    """Whether barriers must not wait for it."""

    def __init__(self, _: int) -> None:
        # Computed once, because every join reads both several times.
        self.living = self.name in ("CONNECTED", "DISCONNECTED")
        self.gone = self.name in ("LOST", "LEFT", "EVICTED")


@dataclass(frozen=True, slots=True)
class MissingRank:
    """A rank that a barrier waits or waited for."""

    rank: int
    state: MissingState
    host: str = ""
    """Empty if no process of this rank was ever seen."""
    pid: int = 0
    gone_for: float = 0.0
    """Seconds since its connection was lost or it left; 0 while it is connected."""
    last_sequence: int | None = None
    """The last sequence of the group that it arrived at."""
    doing: str = ""
    """What it was recently observed doing, for people; empty if unknown."""


class Step(NamedTuple):
    """The training step of a process, and when it reached that, on the monotonic clock."""

    number: int
    since: float


class Observation(NamedTuple):
    """What a process was observed doing, and when on the monotonic clock."""

    doing: str
    at: float


@dataclass(frozen=True, slots=True)
class Closed:
    """How a run was closed; the first call counts."""

    by: str
    reason: str
    at: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """How a generation of a run ended: all ranks saved at one step because they were asked to stop."""

    step: int
    by: str
    reason: str
    at: float
    """Seconds since 1970."""
    generation: int
    """The generation that it ended. A newer one resumes the run."""


class SaveState(enum.IntEnum):
    """The state of a requested save. The values are those of the protocol."""

    ASKED = 1
    AGREED = 2
    DONE = 3
    WITHDRAWN = 4
    LAPSED = 5
    """Its generation ended first."""

    @property
    def stands(self) -> bool:
        """Whether it is pending: the ranks must still do it."""
        return self in (SaveState.ASKED, SaveState.AGREED)


class HandledNotice(NamedTuple):
    """A notice that led to a request for a save."""

    id: str
    number: int
    """The number of the request."""


class CoveredSave(NamedTuple):
    """A request that does not end training, and that one with ``stop`` covers."""

    by: str
    reason: str
    deadline: float | None
    """When it must be complete, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Save:
    """A save that all ranks of a run were asked for."""

    number: int
    """Counts the requests of the run, from 1."""
    state: SaveState
    stop: bool
    """Whether training ends after it."""
    by: str
    reason: str
    asked_at: float
    """Seconds since 1970."""
    since: int
    """The first barrier of its group whose failure is this request's."""
    step: int | None = None
    """The step that the ranks agreed on."""
    ended_at: float | None = None
    """When it was done, was withdrawn or lapsed, in seconds since 1970."""
    generation: int = 0
    """The generation in which it was made."""
    across_generations: bool = False
    """Whether a request that ends training stays in force when a newer generation starts."""
    covered: CoveredSave | None = None
    """The request without ``stop`` that it covers. That one goes on if this one lapses."""
    deadline: float | None = None
    """When it must be complete, in seconds since 1970."""
    late: str = ""
    """Which ranks had not saved at the deadline, for people."""
    notices: tuple[HandledNotice, ...] = ()
    """The notices that led to this request or to earlier ones, oldest first."""

    def lapses_before(self, generation: int) -> bool:
        """Whether it is a request to end training that is not for this generation."""
        return self.stop and not self.across_generations and self.generation < generation


class SlowestWrite(NamedTuple):
    """The write of a checkpoint that took longest."""

    rank: int
    host: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that all ranks have committed."""

    step: int | None
    """None: the save has none."""
    committed_at: float
    """Seconds since 1970."""
    bytes: int | None
    """Bytes of all ranks together; None: no rank reported any."""
    slowest: SlowestWrite | None
    """None: no rank reported a time."""
    prefix: str
    """The group of the barrier that committed it."""
    sequence: int


@dataclass(frozen=True, slots=True)
class FailedSave:
    """A save that was not committed."""

    step: int | None
    """None: the save has none, or the ranks were at different ones."""
    failed_at: float
    """Seconds since 1970."""
    reason: str
    prefix: str
    """The group of the barrier that failed."""
    sequence: int


@dataclass(frozen=True, slots=True)
class CheckpointHistory:
    """The saves of a run, as its ranks reported them."""

    newest: Checkpoint | None = None
    """The checkpoint that was committed last."""
    committed: int = 0
    """Number of commits."""
    intervals: tuple[float, ...] = ()
    """Seconds between the last commits of one group, oldest first."""
    failures: tuple[FailedSave, ...] = ()
    """The last failed saves, newest first."""

    @property
    def interval(self) -> float | None:
        """Usual seconds between two commits; None before the third commit of a group."""
        return median(self.intervals) if len(self.intervals) > 1 else None


class NodeInfo(NamedTuple):
    """One incarnation of an agent."""

    incarnation: str
    address: str
    """Where other nodes reach it."""
    pid: int
    name: str = ""
    """The name of its machine as the scheduler knows it; empty: the same as the address."""

    @property
    def node_name(self) -> str:
        """The name of its machine as the scheduler knows it."""
        return self.name or self.address


class EvictedNode(NamedTuple):
    """An agent that was evicted: it may never join again."""

    incarnation: str
    round: int | None
    """The complete round that it was in; None: it was in none."""


class NodeStanding(enum.IntEnum):
    """A node's place in the rendezvous of its run."""

    PARTICIPANT = 1
    WAITING = 2
    REDUNDANT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousSettings:
    """What a node asks of its rendezvous; times in seconds."""

    min_nodes: int
    max_nodes: int
    join_timeout: float
    """How long the node waits for a round."""
    last_call_timeout: float
    """How long a round waits for more nodes after ``min_nodes`` have joined."""
    keep_alive_timeout: float
    """How long the node's place is kept when its stream is lost."""

    @property
    def size(self) -> tuple[int, int]:
        """The fewest and the most nodes of a round."""
        return self.min_nodes, self.max_nodes


@dataclass(frozen=True, slots=True)
class Failure:
    """One rank's vote that a barrier must not be released."""

    rank: int
    host: str
    pid: int
    reason: str


class Ranks(tuple[int, ...]):
    """A list of ranks, shared by all ranks of a group, so that derived values are computed once."""

    @staticmethod
    def of(ranks: Iterable[int]) -> "Ranks":
        """Return the list itself if it is one already."""
        return ranks if isinstance(ranks, Ranks) else Ranks(ranks)

    @cached_property
    def members(self) -> frozenset[int]:
        """The ranks, to look one up."""
        return frozenset(self)

    @cached_property
    def is_ascending(self) -> bool:
        """Whether every rank is listed once, the lowest first."""
        return all(one < other for one, other in pairwise(self))

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


ALL_RANKS = Ranks()
"""The participants of a group whose barriers cover the whole world."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The ranks that a group's barriers cover, as one process knows them."""

    world_size: int
    participants: Ranks = ALL_RANKS
    """Ascending ranks; empty: all ranks of the world."""

    @property
    def size(self) -> int:
        """How many ranks must arrive."""
        return len(self.participants) or self.world_size

    def __contains__(self, rank: int) -> bool:
        if self.participants:
            return rank in self.participants.members
        return 0 <= rank < self.world_size

    def __iter__(self) -> Iterator[int]:
        return iter(self.participants or range(self.world_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The one outcome of (run_id, prefix, sequence)."""

    run_id: str
    prefix: str
    sequence: int
    generation: int
    outcome: Outcome
    message: str
    """What happened, for people; made by :mod:`muster.service.core.vocabulary.report`."""
    missing: tuple[MissingRank, ...]
    arrived: int
    required: int
    payloads: tuple[tuple[int, bytes], ...]
    """(rank, bytes) in ascending order of rank, only on a release."""
    failures: tuple[Failure, ...]
    decided_at: float
    """Seconds since 1970."""
    wait: float
    """Seconds from the first arrival to the decision."""
    skew: float
    """Seconds from the first to the last arrival."""
    last_arrival_rank: int | None
    payloads_dropped: bool = False
    """The payloads of this release were dropped to make room. No rank is told such a release."""

    @property
    def payload_bytes(self) -> int:
        """The size of all payloads."""
        return sum(len(payload) for _, payload in self.payloads)
