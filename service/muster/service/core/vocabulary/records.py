"""The durable state of the core, as records, and what deletes them."""

from dataclasses import dataclass
from typing import TypeAlias

from muster.service.core.vocabulary.local import (
    ForgetLocalCheckpoint,
    LocalCheckpointRecord,
    RecoveryRecord,
)
from muster.service.core.vocabulary.model import (
    CheckpointHistory,
    Closed,
    Decision,
    EvictedNode,
    MemberState,
    NodeInfo,
    RendezvousSettings,
    Save,
    Shape,
    Stopped,
)
from muster.service.core.vocabulary.operations import Changed


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The durable part of a run."""

    run_id: str
    generation: int
    closed: Closed | None = None
    active_at: float | None = None
    """About when it was last used, in seconds since 1970; None in records of older versions."""
    stopped: Stopped | None = None
    evicted_nodes: tuple[EvictedNode, ...] = ()
    """The last evicted nodes, oldest first."""


@dataclass(frozen=True, slots=True)
class ForgetRun:
    """Deletes all records of a run."""

    run_id: str


@dataclass(frozen=True, slots=True)
class EvictionRecord:
    """Processes of a rank up to this ordinal are refused, in one generation."""

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
    """A node that is in the complete round, or that this round has lost."""

    run_id: str
    node: NodeInfo
    attempt: int
    rank: int
    settings: RendezvousSettings
    lost: bool = False


@dataclass(frozen=True, slots=True)
class AgreementRecord:
    """The settings of the nodes that have a place, with the longest of their keep-alive timeouts."""

    run_id: str
    settings: RendezvousSettings


@dataclass(frozen=True, slots=True)
class ForgetAgreement:
    """Deletes the record, because no node has a place."""

    run_id: str


@dataclass(frozen=True, slots=True)
class ForgetRound:
    """Deletes the record of a round."""

    run_id: str
    round: int


@dataclass(frozen=True, slots=True)
class ForgetParticipant:
    """Deletes the record of a node that is no longer in the complete round."""

    run_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """The newest requested save of a run."""

    run_id: str
    save: Save


@dataclass(frozen=True, slots=True)
class CheckpointsRecord:
    """The history of a run's saves."""

    run_id: str
    history: CheckpointHistory


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """The durable part of a group. Its decisions are records of their own."""

    run_id: str
    prefix: str
    generation: int
    first_sequence: int


@dataclass(frozen=True, slots=True)
class RankOwnerRecord:
    """The process that owns a rank in a group, and its first sequence."""

    run_id: str
    prefix: str
    rank: int
    incarnation: str
    ordinal: int
    host: str
    pid: int
    start_sequence: int
    shape: Shape | int
    """Or the number of its :class:`ShapeRecord`, which all ranks with this shape share."""
    state: MemberState
    """If it is gone: its state. Otherwise IDLE for a process of unary calls, and DISCONNECTED for others."""
    lineage: int
    """The lineage of its :class:`~muster.service.core.membership.process.Process`."""
    membership_start: int | None = None
    """The first sequence of the membership that it joined. If the group was reset since, it arrived at the
    newest release and may not have heard it. None, as before 0.2.0: it joined the current membership."""
    node_name: str = ""
    """The name of its node as the scheduler knows it; empty: the same as the host."""


@dataclass(frozen=True, slots=True)
class ShapeRecord:
    """A shape that ranks of a group brought; one record for all of them."""

    run_id: str
    prefix: str
    number: int
    """The number by which owners' records refer to it, from 1."""
    shape: Shape


@dataclass(frozen=True, slots=True)
class ForgetShape:
    """Deletes the record of a shape."""

    run_id: str
    prefix: str
    number: int


@dataclass(frozen=True, slots=True)
class ForgetRankOwner:
    """Deletes the record of a rank's owner."""

    run_id: str
    prefix: str
    rank: int


@dataclass(frozen=True, slots=True)
class ForgetDecision:
    """Deletes the record of a decision."""

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
    """Deletes the record of a key."""

    run_id: str
    key: str


@dataclass(frozen=True, slots=True)
class StoreOperationRecord:
    """The last change of a store's client and its answer, so that it is carried out once."""

    run_id: str
    client: str
    number: int
    answer: Changed
    order: int = 0
    """The number of this change in the run. At the bound, the client with the lowest number goes."""


@dataclass(frozen=True, slots=True)
class ForgetStoreOperation:
    """Deletes the record of a store's client."""

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
    | AgreementRecord
    | SaveRecord
    | CheckpointsRecord
    | StoreKeyRecord
    | StoreOperationRecord
    | LocalCheckpointRecord
    | RecoveryRecord
)
Forget: TypeAlias = (
    ForgetRankOwner
    | ForgetShape
    | ForgetDecision
    | ForgetRound
    | ForgetParticipant
    | ForgetAgreement
    | ForgetStoreKey
    | ForgetStoreOperation
    | ForgetLocalCheckpoint
)
Record: TypeAlias = StoredRecord | Forget | ForgetRun
