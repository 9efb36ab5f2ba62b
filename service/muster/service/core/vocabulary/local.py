"""Local checkpoints: data types, the events of keepers and ranks, the answers, and the durable records."""

import enum
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from muster.service.core.vocabulary.model import SessionId


class Attempt(NamedTuple):
    """Identifies one attempt to save. Later attempts of a run compare greater."""

    generation: int
    number: int
    """The number of the save's barrier."""


class Level(enum.IntEnum):
    """What a checkpoint survives. Each level includes those before it."""

    LOCAL = 1
    """All ranks have written their parts, on their nodes."""
    REPLICATED = 2
    """Each part is on as many further nodes as was asked for."""
    PERSISTED = 3
    """It is committed in shared storage."""


class Permit(enum.IntEnum):
    """Whether a process may commit a checkpoint in shared storage."""

    NONE = 0
    """None has been asked for."""
    GIVEN = 1
    """A process may commit it, and may have done so."""
    WITHDRAWN = 2
    """A recovery has passed over it. It is not permitted again, but may have been committed before."""


@dataclass(frozen=True, slots=True)
class LocalCheckpoint:
    """A checkpoint whose parts are on the nodes that wrote them."""

    attempt: Attempt
    step: int
    world_size: int
    """The number of its parts, one for each rank."""
    manifest_size: int
    """Bytes."""
    manifest_digest: bytes
    """A part counts only where it was verified against the manifest of this digest."""
    replicas: int
    """On how many nodes beside the one that wrote it each part is to be."""
    persist_to: str = ""
    """Its folder or address in shared storage; empty: it is not persisted."""
    keep_persisted: int = 0
    """How many checkpoints shared storage keeps; 0: all."""
    size: int = 0
    """Bytes of all parts."""


@dataclass(frozen=True, slots=True)
class KeeperInfo:
    """The process that keeps parts on a node."""

    id: str
    url: str
    """Where other keepers reach it."""
    domain: str = ""
    """The failure domain of its node; empty: one of its own."""
    node_name: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class Attachment:
    """The ranks whose parts a keeper keeps."""

    generation: int
    world_size: int
    ranks: frozenset[int]
    replicas: int = 0


@dataclass(frozen=True, slots=True)
class Holding:
    """What a keeper has of one checkpoint, verified."""

    attempt: Attempt
    manifest_digest: bytes
    ranks: frozenset[int]
    """The ranks whose parts it has."""
    persisted_ranks: frozenset[int] = frozenset()
    """The ranks whose parts it has copied to shared storage."""
    persisted_as: str = ""
    """Where it has committed the checkpoint in shared storage; empty: it has not."""


class Disk(NamedTuple):
    """The space of a keeper's folder, in bytes."""

    used: int = 0
    quota: int = 0


class Transfer(NamedTuple):
    """What a keeper has fetched lately from another one."""

    url: str
    """The URL of the other one."""
    bytes: int
    seconds: float


# ---------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class ConnectKeeper:
    """A keeper opens its stream, with all that it has."""

    session: SessionId
    run_id: str
    keeper: KeeperInfo
    holdings: tuple[Holding, ...]
    disk: Disk
    new_token: str
    """A new secret. It becomes the token of the run's keepers if they have none yet."""
    attachment: Attachment | None = None
    transfers: tuple[Transfer, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportKeeper:
    """A keeper's report of what has changed; the answer goes to ``session``."""

    session: SessionId
    run_id: str
    keeper_id: str
    holdings: tuple[Holding, ...]
    confirmed: int
    """The number that its last orders ask to confirm, if it confirms it; else 0."""
    attachment: Attachment | None = None
    disk: Disk | None = None
    transfers: tuple[Transfer, ...] = ()
    """None: as before."""


@dataclass(frozen=True, slots=True)
class CommitLocal:
    """Makes a checkpoint that all ranks have written; the answer goes to ``session``."""

    session: SessionId
    run_id: str
    checkpoint: LocalCheckpoint
    keeper_id: str
    """The keeper that has the manifest; empty: the ranks write it to shared storage themselves."""
    wait_for: Level = Level.LOCAL
    persisted_as: str = ""
    """Without a keeper: where the ranks have committed it; empty: they ask whether they may."""


@dataclass(frozen=True, slots=True)
class RequestPermit:
    """A keeper asks whether it may commit a checkpoint in shared storage; the answer goes to ``session``."""

    session: SessionId
    run_id: str
    keeper_id: str
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Recover:
    """Asks for the checkpoint that all ranks of a generation resume from; the answer goes to ``session``."""

    session: SessionId
    run_id: str
    generation: int
    number: int
    """Counts the decisions in the generation."""
    world_size: int
    absent: tuple[Attempt, ...] = ()
    """Unsettled attempts that are not in shared storage, and never will be."""
    without_local: bool = False
    """Whether the ranks could not load several local checkpoints, and ask for none."""


LocalEvent: TypeAlias = ConnectKeeper | ReportKeeper | CommitLocal | RequestPermit | Recover

# ---------------------------------------------------------------------- answers


class Location(NamedTuple):
    """A keeper, and ranks whose parts it has or writes."""

    url: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Peers:
    """Tells a keeper the keepers of the current generation."""

    generation: int
    token: str
    keepers: tuple[Location, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """What a keeper is to do about one checkpoint."""

    checkpoint: LocalCheckpoint
    level: Level
    ranks: tuple[int, ...]
    """The ranks whose parts it is to hold. What else it has of the checkpoint stays, too."""
    sources: tuple[Location, ...]
    persist: tuple[int, ...] = ()
    """The ranks whose parts it is to copy to shared storage."""
    commit: bool = False
    """Whether it is to commit the checkpoint in shared storage."""


@dataclass(frozen=True, slots=True)
class Orders:
    """Tells a keeper all that it is to hold."""

    checkpoints: tuple[Order, ...]
    forget_before: Attempt
    """Files of earlier attempts may be deleted, unless an order names their checkpoint."""
    confirm: int = 0
    """Not 0: the keeper confirms this number when it has verified all that it can."""


@dataclass(frozen=True, slots=True)
class ReportTaken:
    """Answers a ReportKeeper."""


@dataclass(frozen=True, slots=True)
class LocalCommitted:
    """Answers a CommitLocal."""

    level: Level
    unsettled: tuple[LocalCheckpoint, ...] = ()
    """Without a keeper: as in :class:`Permitted`."""


@dataclass(frozen=True, slots=True)
class Permitted:
    """Answers a RequestPermit."""

    unsettled: tuple[LocalCheckpoint, ...]
    """Older checkpoints that were permitted, and perhaps not committed, from the newest to the oldest."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """Answers a Recover, the same for all ranks."""

    checkpoint: LocalCheckpoint | None
    """None: resume from shared storage."""
    reason: str
    unsettled: tuple[LocalCheckpoint, ...] = ()
    """Without a checkpoint: those that may be in shared storage, from the newest to the oldest."""


LocalMessage: TypeAlias = Peers | Orders | ReportTaken | LocalCommitted | Permitted | Recovered

# ---------------------------------------------------------------------- records


@dataclass(frozen=True, slots=True)
class LocalCheckpointRecord:
    """A local checkpoint, and how safe it is."""

    run_id: str
    checkpoint: LocalCheckpoint
    level: Level
    keeper_id: str
    """The keeper that had the manifest first; empty: the ranks wrote it to shared storage themselves."""
    made_at: float
    """Seconds since 1970."""
    persisted_as: str = ""
    permit: Permit = Permit.NONE


@dataclass(frozen=True, slots=True)
class ForgetLocalCheckpoint:
    """Deletes the record of a local checkpoint."""

    run_id: str
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class RecoveryRecord:
    """The last decision on what the ranks of a run resume from."""

    run_id: str
    generation: int
    number: int
    world_size: int
    attempt: Attempt | None
    """None: they resume from shared storage."""
    reason: str
    newest: Attempt | None
    """The newest attempt that the run had until then. It and all before it are never committed again."""
