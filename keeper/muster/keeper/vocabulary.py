"""The data types of a keeper: checkpoints, orders, and holdings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.containment import check_name
from muster.checkpoint.directory import METADATA
from muster.checkpoint.manifest import MANIFEST, FileEntry, Manifest, ManifestReference

PERSISTED = "persisted"
"""The level of a checkpoint that is committed in shared storage."""
HEAD = (MANIFEST, METADATA)
"""The head of a checkpoint: the two files that belong to no rank. A keeper that holds a part has both."""
FIRST = SaveAttempt(0, 0)
"""No attempt is earlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCheckpoint:
    """A checkpoint whose parts are on the nodes that wrote them."""

    attempt: SaveAttempt
    step: int
    world_size: int
    manifest: ManifestReference
    persist_to: str = ""
    """A folder, or an address in shared storage; empty: it is not persisted."""
    keep_persisted: int = 0
    """How many checkpoints shared storage keeps; 0: all."""


@dataclass(frozen=True, slots=True)
class Location:
    """A keeper, and ranks whose parts it has or writes."""

    url: str
    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class Order:
    """What a keeper is to do about one checkpoint."""

    checkpoint: LocalCheckpoint
    level: str = ""
    """In lower case, such as ``replicated``."""
    ranks: frozenset[int] = frozenset()
    """The ranks whose parts it is to hold."""
    sources: tuple[Location, ...] = ()
    persist: frozenset[int] = frozenset()
    """The ranks whose parts it is to copy to shared storage."""
    commit: bool = False
    """Whether it is to commit the checkpoint in shared storage."""


@dataclass(frozen=True, slots=True)
class Orders:
    """All that a keeper is to hold."""

    orders: Mapping[SaveAttempt, Order] = field(default_factory=dict)
    forget_before: SaveAttempt = FIRST
    """Earlier attempts are deleted, unless they are named."""
    confirm: int = 0
    """Not 0: this number is to be confirmed when all that can be verified of them here is verified."""


@dataclass(frozen=True, slots=True)
class Peers:
    """The keepers of the current generation."""

    token: str = field(default="", repr=False)
    """The bearer token that a keeper shows to another one."""
    keepers: tuple[Location, ...] = ()

    def of_rank(self, rank: int) -> str | None:
        """Return the URL of the keeper of a rank; None if there is no such keeper."""
        return next((keeper.url for keeper in self.keepers if rank in keeper.ranks), None)


@dataclass(frozen=True, slots=True)
class Attachment:
    """The ranks that a keeper keeps for."""

    generation: int
    world_size: int
    ranks: frozenset[int]
    replicas: int = 0


@dataclass(frozen=True, slots=True)
class Holding:
    """What a keeper has of one checkpoint, verified."""

    attempt: SaveAttempt
    manifest_digest: bytes = b""
    ranks: frozenset[int] = frozenset()
    persisted_ranks: frozenset[int] = frozenset()
    persisted_as: str = ""


@dataclass(frozen=True, slots=True)
class Transfer:
    """What came lately from another keeper."""

    bytes: int
    seconds: float
    """The time during which it came."""


class UnusableManifestError(ValueError):
    """A manifest names files that no rank of this version writes."""


@dataclass(frozen=True)
class Head:
    """The verified manifest of a checkpoint. The keeper has verified torch's metadata against it, too.

    Args:
        reference: the size and digest of its file.
        manifest: its content.

    Raises:
        UnusableManifestError: a file's name leads out of the checkpoint's folder, or is reserved.
    """

    reference: ManifestReference
    manifest: Manifest

    def __post_init__(self) -> None:
        if METADATA not in self.manifest.files:
            raise UnusableManifestError(f"it names no {METADATA}")
        for name, entry in self.manifest.files.items():
            if name == METADATA:
                continue
            try:
                check_name(name)
            except ValueError:
                raise UnusableManifestError(f"it names {name!r}, which is no name in a folder") from None
            if name.startswith(".") or name == MANIFEST or entry.rank is None:
                raise UnusableManifestError(f"it names {name!r}, which is no file of a rank")

    @cached_property
    def parts(self) -> Mapping[int, frozenset[str]]:
        """By rank, the names of the files that it wrote."""
        found: dict[int, set[str]] = {}
        for name, entry in self.manifest.files.items():
            if name != METADATA and entry.rank is not None:
                found.setdefault(entry.rank, set()).add(name)
        return {rank: frozenset(names) for rank, names in found.items()}

    def part(self, rank: int) -> frozenset[str]:
        """Return the names of the files that a rank wrote."""
        return self.parts.get(rank, frozenset())

    def entry(self, name: str) -> FileEntry:
        """Return a file's size and digests.

        Raises:
            KeyError: the checkpoint has no such file.
        """
        return self.manifest.files[name]
