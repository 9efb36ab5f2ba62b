"""Nodes with keepers, as the tests of local checkpoints know them: which bytes are on which disk."""

from dataclasses import dataclass, field

from muster.service.core.vocabulary.local import (
    Attachment,
    Attempt,
    Holding,
    KeeperInfo,
    LocalCheckpoint,
    Location,
    Order,
    Orders,
    Peers,
)
from muster.service.core.vocabulary.model import SessionId


@dataclass
class Folder:
    """What a node has of one attempt."""

    digest: bytes
    """That of the manifest."""
    parts: dict[int, bool] = field(default_factory=dict)
    """By rank: whether the bytes are as they were written."""
    verified: set[int] = field(default_factory=set)
    """The ranks whose parts the keeper has verified. They may have been damaged since."""
    uploaded: set[int] = field(default_factory=set)
    persisted_as: str = ""
    has_head: bool = True
    """Whether the manifest is here. Without it, the keeper can verify nothing."""
    tried: tuple[Location, ...] = ()
    """The sources that did not have the manifest."""

    def holding(self, attempt: Attempt) -> Holding:
        """What the keeper reports of it."""
        return Holding(
            attempt, self.digest, frozenset(self.verified), frozenset(self.uploaded), self.persisted_as
        )


@dataclass
class Node:
    """A node, its disk, and its keeper, which may be away."""

    name: str
    domain: str
    session: SessionId | None = None
    attachment: Attachment | None = None
    """The ranks that have attached; it is gone with the keeper's process."""
    known: Attachment | None = None
    """The ranks that the coordinator knows. It keeps them while the keeper is away."""
    disk: dict[Attempt, Folder] = field(default_factory=dict)
    reported: dict[Attempt, Holding] = field(default_factory=dict)
    """What the coordinator was told on the open stream."""
    orders: Orders | None = None
    """As they were told last on the open stream."""
    peers: Peers | None = None
    committing: dict[Attempt, LocalCheckpoint] = field(default_factory=dict)
    """What it was permitted to commit in shared storage, and is about to."""

    @property
    def url(self) -> str:
        """Where its peers reach it."""
        return f"http://{self.name}"

    @property
    def info(self) -> KeeperInfo:
        """What it says of itself."""
        return KeeperInfo(self.name, self.url, self.domain)

    @property
    def confirmed(self) -> int:
        """The number that its orders ask to confirm, if nothing more can be verified; else 0."""
        if self.orders is None or any(self._may_verify(order) for order in self.orders.checkpoints):
            return 0
        return self.orders.confirm

    def _may_verify(self, order: Order) -> bool:
        folder = self.disk.get(order.checkpoint.attempt)
        if folder is None:
            return False
        if not folder.has_head:
            return bool(folder.parts and order.sources) and folder.tried != order.sources
        return not set(folder.parts) <= folder.verified

    def write(self, checkpoint: LocalCheckpoint, rank: int) -> None:
        """A rank writes its part."""
        folder = self.disk.get(checkpoint.attempt)
        if folder is None or folder.digest != checkpoint.manifest_digest:
            folder = self.disk[checkpoint.attempt] = Folder(checkpoint.manifest_digest)
        folder.parts[rank] = True

    def verify(self, attempt: Attempt) -> None:
        """The keeper reads all that it has of an attempt, and deletes what is damaged."""
        folder = self.disk[attempt]
        if not folder.has_head:
            return
        folder.parts = {rank: True for rank, is_intact in folder.parts.items() if is_intact}
        folder.verified = set(folder.parts)
        folder.uploaded &= folder.verified

    def stop(self) -> None:
        """The keeper's process ends. Its successor has verified nothing."""
        self.attachment, self.committing = None, {}
        for folder in self.disk.values():
            folder.tried = ()
            folder.verified, folder.uploaded, folder.persisted_as = set(), set(), ""

    def break_stream(self) -> None:
        """Its stream is over."""
        self.session = self.orders = self.peers = None
        self.reported = {}

    def holdings(self) -> tuple[Holding, ...]:
        """All that it has verified."""
        found = (folder.holding(attempt) for attempt, folder in sorted(self.disk.items()))
        return tuple(holding for holding in found if holding.ranks)
