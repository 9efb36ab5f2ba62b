"""The keepers of a run: which are connected, for which ranks they keep parts, and what they have."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from muster.service.core.local.placement import Node, place
from muster.service.core.vocabulary.local import (
    Attachment,
    Attempt,
    Disk,
    Holding,
    KeeperInfo,
    Orders,
    Transfer,
)
from muster.service.core.vocabulary.model import SessionId


@dataclass(slots=True, eq=False)
class Keeper:
    """One keeper, connected or not."""

    info: KeeperInfo
    session: SessionId | None = None
    """Its stream; None: it is not connected."""
    attachment: Attachment | None = None
    holdings: dict[Attempt, Holding] = field(default_factory=dict)
    disk: Disk = field(default_factory=Disk)
    transfers: tuple[Transfer, ...] = ()
    """What it has fetched lately, for people."""
    sent: Orders | None = None
    """The orders that were sent to it last; None: none on this stream."""
    asked: int = 0
    """The number that these orders ask to confirm; 0: they do not ask."""
    confirmed: int = 0
    """The number that it has confirmed."""
    starves_for: set[tuple[Attempt, int]] = field(default_factory=set)
    """The attempts and ranks whose parts it may need, and that no connected keeper has."""

    @property
    def domain(self) -> str:
        """The failure domain of its node. A node without one is a domain of its own."""
        return self.info.domain or f"node {self.info.id}"


class Keepers:
    """The keepers of one run, and where each one's parts are copied to."""

    def __init__(self) -> None:
        self._by_id: dict[str, Keeper] = {}
        self.generation = 0
        """The newest generation for which a keeper is attached."""
        self.placement: dict[str, tuple[str, ...]] = {}
        """By the id of a keeper: the ids of the keepers that get copies of its parts."""
        self._origins: dict[str, list[Keeper]] = {}
        """By the id of a keeper: the keepers whose parts are copied to it."""
        self._placed: tuple[tuple[Node, ...], int] | None = None
        """The input of the current placement: the nodes, and the number of copies; None: no placement."""
        self._previous: dict[str, tuple[str, ...]] = {}
        """The placement of the generation before."""

    def __iter__(self) -> Iterator[Keeper]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, keeper_id: str) -> Keeper | None:
        """Return the keeper of this id."""
        return self._by_id.get(keeper_id)

    def add(self, info: KeeperInfo) -> Keeper:
        """Return the keeper of this id, as it describes itself now."""
        keeper = self._by_id.setdefault(info.id, Keeper(info))
        keeper.info = info
        return keeper

    def remove_if_unused(self, keeper: Keeper) -> None:
        """Remove a keeper that is not connected and keeps for no rank of the current generation.

        The placement may name it until copies are placed again.
        """
        has_ranks = self.is_current(keeper) and self.ranks_of(keeper.info.id)
        if keeper.session is None and not has_ranks:
            self._by_id.pop(keeper.info.id, None)

    def connected(self) -> list[Keeper]:
        """Return the connected keepers."""
        return [keeper for keeper in self if keeper.session is not None]

    def is_current(self, keeper: Keeper) -> bool:
        """Whether a keeper keeps for ranks of the current generation."""
        return keeper.attachment is not None and keeper.attachment.generation == self.generation

    def current(self) -> list[Keeper]:
        """Return the keepers of the current generation, connected or not."""
        return [keeper for keeper in self if self.is_current(keeper)]

    def ranks_of(self, keeper_id: str) -> frozenset[int]:
        """Return the ranks for which a keeper keeps parts."""
        keeper = self._by_id.get(keeper_id)
        return (
            keeper.attachment.ranks if keeper is not None and keeper.attachment is not None else frozenset()
        )

    def attach(self, keeper: Keeper, attachment: Attachment) -> bool:
        """Attach a keeper to ranks. An attachment of an earlier generation is ignored.

        Returns:
            Whether that changes anything.
        """
        if keeper.attachment == attachment or attachment.generation < self.generation:
            return False
        for other in self.current() if attachment.generation == self.generation else ():
            known = other.attachment
            if other is not keeper and known is not None and known.ranks & attachment.ranks:
                # The rank was moved to another node within its generation.
                other.attachment = replace(known, ranks=known.ranks - attachment.ranks)
                self.remove_if_unused(other)
        keeper.attachment = attachment
        if attachment.generation > self.generation:
            self.generation = attachment.generation
            self._remove_disconnected()
        return True

    def covers(self, world_size: int) -> bool:
        """Whether each rank of the current generation has a connected keeper."""
        ranks: set[int] = set()
        for keeper in self.current():
            attachment = keeper.attachment
            if keeper.session is not None and attachment is not None and attachment.world_size == world_size:
                ranks |= attachment.ranks
        return len(ranks) == world_size

    def place(self) -> bool:
        """Place copies again if the nodes, their domains or the number of copies have changed.

        Returns:
            Whether they have changed.
        """
        current = self.current()
        nodes = tuple(Node(keeper.info.id, keeper.info.domain) for keeper in current)
        replicas = max((keeper.attachment.replicas for keeper in current if keeper.attachment), default=0)
        if self._placed == (nodes, replicas):
            return False
        self._placed = nodes, replicas
        previous = self.placement or self._previous or self._placement_of_holdings(current)
        self.placement = place(nodes, replicas, previous)
        self._origins = {}
        for origin, holders in self.placement.items():
            for holder in holders:
                self._origins.setdefault(holder, []).append(self._by_id[origin])
        return True

    def origins(self, keeper: Keeper) -> Sequence[Keeper]:
        """Return the keepers whose parts are copied to a keeper."""
        return self._origins.get(keeper.info.id, ())

    def _placement_of_holdings(self, current: Sequence[Keeper]) -> dict[str, tuple[str, ...]]:
        """Return the placement of an earlier coordinator, as the keepers' holdings show it."""
        holders: dict[int, dict[str, None]] = {}
        for keeper in current:
            for holding in keeper.holdings.values():
                if holding.attempt.generation == self.generation:
                    for rank in holding.ranks:
                        holders.setdefault(rank, {})[keeper.info.id] = None
        return {
            keeper.info.id: tuple(holders.get(min(self.ranks_of(keeper.info.id), default=-1), ()))
            for keeper in current
        }

    def _remove_disconnected(self) -> None:
        """Start a new generation: remove the keepers that are not connected, and clear the placement."""
        self._previous = self.placement or self._previous
        self.placement, self._origins, self._placed = {}, {}, None
        for keeper in [one for one in self if one.session is None]:
            del self._by_id[keeper.info.id]
