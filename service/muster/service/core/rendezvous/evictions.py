"""The nodes that were evicted from the rendezvous of a run."""

from collections.abc import Iterable

from muster.service.core.vocabulary.model import EvictedNode

MAX_EVICTED = 256
"""Evicted nodes that a run remembers. The agents of older ones have ended long ago."""


class Evictions:
    """Agents that may never join again, and the rounds that they were evicted from."""

    def __init__(self) -> None:
        self._rounds: dict[str, int | None] = {}
        """By incarnation, oldest first."""

    def __contains__(self, incarnation: str) -> bool:
        return incarnation in self._rounds

    @property
    def nodes(self) -> tuple[EvictedNode, ...]:
        """All of them, oldest first; the run's record keeps them."""
        return tuple(EvictedNode(*item) for item in self._rounds.items())

    def restore(self, nodes: Iterable[EvictedNode]) -> None:
        """Restore them from the run's record."""
        self._rounds = {node.incarnation: node.round for node in nodes}

    def add(self, incarnation: str, round: int | None) -> None:
        """Remember an evicted agent.

        Args:
            incarnation: of the agent.
            round: the complete round that it was in, if any.
        """
        self._rounds[incarnation] = round
        if len(self._rounds) > MAX_EVICTED:
            del self._rounds[next(iter(self._rounds))]

    def count(self, round: int) -> int:
        """Return how many nodes were evicted from a complete round."""
        return sum(evicted == round for evicted in self._rounds.values())
