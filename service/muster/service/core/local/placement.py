"""Placeholder until the real one lands."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Node(NamedTuple):
    """A node."""

    id: str
    domain: str


def place(
    nodes: Sequence[Node], replicas: int, previous: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return the next ones in the ring."""
    ids = sorted(node.id for node in nodes)
    count = min(replicas, len(ids) - 1)
    return {one: tuple(ids[(i + 1 + k) % len(ids)] for k in range(count)) for i, one in enumerate(ids)}
