"""The coordinator's decisions, as a worker sees them."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from muster.v1 import common_pb2 as pb


class Outcome(enum.Enum):
    """The outcome of a barrier. The names are those of ``muster.v1.Outcome``."""

    RELEASED = "RELEASED"
    """Every required rank arrived, and none voted to fail."""
    TIMED_OUT = "TIMED_OUT"
    """The first arrival's timeout ran out."""
    ABORTED = "ABORTED"
    """A rank voted to fail, an operator aborted it, or a newer generation took its place."""
    MEMBER_LOST = "MEMBER_LOST"
    """A rank that was still needed left, or lost its session for longer than the TTL."""
    MISMATCHED = "MISMATCHED"
    """Living ranks disagreed on the world size or the participants."""
    UNKNOWN = "UNKNOWN"
    """The coordinator could not be reached. Execute the barrier again to learn its decision."""


class MissingState(enum.Enum):
    """Why a rank is missing."""

    NEVER_JOINED = "NEVER_JOINED"
    """No process of this rank was seen in this generation."""
    NOT_ARRIVED = "NOT_ARRIVED"
    """Its process is connected, and has not arrived."""
    CONNECTION_LOST = "CONNECTION_LOST"
    """The session of its process broke and has not come back."""
    LEFT = "LEFT"
    """Its process said goodbye."""
    EVICTED = "EVICTED"
    """An operator evicted its process."""


@dataclass(frozen=True, slots=True)
class MissingRank:
    """A rank that did not arrive at a barrier."""

    rank: int
    """The rank."""
    host: str
    """Where its newest process ran; empty if none was ever seen."""
    pid: int
    """That process's id; 0 if none was ever seen."""
    state: MissingState
    """Why it is missing."""
    last_seen: float | None
    """Seconds since it was last seen: 0.0 if it was connected, None if it never was."""
    last_sequence: int | None = None
    """The last barrier of the group that it arrived at."""
    doing: str = ""
    """What its process did a few seconds before, for people: ``main thread in all_reduce, train.py:214``.
    Empty if unknown."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank's vote that a barrier must not be released."""

    rank: int
    """The rank that voted."""
    host: str
    """Where the process that voted ran."""
    pid: int
    """Its process id."""
    reason: str
    """Why, in the rank's own words."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The one outcome of a barrier, the same for every rank."""

    prefix: str
    """The group."""
    sequence: int
    """The barrier's number within its group, from 0."""
    outcome: Outcome
    """Its outcome."""
    message: str
    """What happened, for people."""
    missing: tuple[MissingRank, ...] = ()
    """Every rank that had not arrived, in ascending order; empty when released."""
    failures: tuple[Failure, ...] = ()
    """The votes that aborted it, if votes did."""
    payloads: Mapping[int, bytes] = field(default_factory=dict)
    """The payloads by rank; a rank without a payload is absent."""
    wait: float = 0.0
    """Seconds from the first arrival to the decision, on the coordinator's clock."""
    skew: float = 0.0
    """Seconds from the first to the last arrival."""
    last_arrival_rank: int | None = None
    """The straggler."""

    @property
    def released(self) -> bool:
        """Whether every rank arrived and none voted to fail."""
        return self.outcome is Outcome.RELEASED


def decision_from_pb(message: pb.Decision) -> Decision:
    """Convert a decision's message."""
    return Decision(
        prefix=message.prefix,
        sequence=message.sequence,
        outcome=_outcome(message.outcome),
        message=message.message,
        missing=tuple(missing_from_pb(one) for one in message.missing),
        failures=tuple(Failure(f.rank, f.host, f.pid, f.reason) for f in message.failures),
        payloads={one.rank: one.data for one in message.payloads},
        wait=message.wait_ms / 1000,
        skew=message.skew_ms / 1000,
        last_arrival_rank=(message.last_arrival_rank if message.HasField("last_arrival_rank") else None),
    )


def missing_from_pb(message: pb.MissingRank) -> MissingRank:
    """Convert a missing rank's message."""
    state = _missing_state(message.state)
    seen = state is not MissingState.NEVER_JOINED
    return MissingRank(
        rank=message.rank,
        host=message.host,
        pid=message.pid,
        state=state,
        last_seen=message.gone_ms / 1000 if seen else None,
        last_sequence=message.last_sequence if message.HasField("last_sequence") else None,
        doing=message.doing,
    )


def _outcome(value: "pb.Outcome.ValueType") -> Outcome:
    """Return the outcome. One that only a newer coordinator knows is UNKNOWN, so never a release."""
    try:
        return Outcome(pb.Outcome.Name(value).removeprefix("OUTCOME_"))
    except ValueError:
        return Outcome.UNKNOWN


def _missing_state(value: "pb.MissingState.ValueType") -> MissingState:
    """Return the state. One that only a newer coordinator knows is NOT_ARRIVED, which is true of all."""
    try:
        return MissingState(pb.MissingState.Name(value).removeprefix("MISSING_STATE_"))
    except ValueError:
        return MissingState.NOT_ARRIVED
