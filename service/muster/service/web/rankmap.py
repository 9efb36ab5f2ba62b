"""All ranks of a run as a small picture: a square for each rank, and an SVG path for each state."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

CELL = 10
"""SVG units from one square to the next."""
MIN_COLUMNS = 32
LARGEST, SMALLEST = 14, 8
"""Pixels of a square, where there is room: in a single row, and in several rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The ranks of one state."""

    state: str
    path: str
    """The ``d`` of an SVG path; its dashes are the squares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMap:
    """The picture, as SVG attributes."""

    width: int
    """Pixels."""
    columns: int
    rows: int
    layers: tuple[Layer, ...]


def rank_map(states: Mapping[str, Iterable[int]]) -> RankMap:
    """Draw ranks.

    Args:
        states: the ranks of each state; a rank has one state.
    """
    ranks = {state: sorted(of_state) for state, of_state in states.items()}
    count = 1 + max((of_state[-1] for of_state in ranks.values() if of_state), default=-1)
    columns = max(MIN_COLUMNS, 2 ** math.ceil(math.log2(2 * math.sqrt(max(1, count)))))
    rows = math.ceil(count / columns)
    columns = min(columns, count)
    return RankMap(
        width=columns * (LARGEST if rows == 1 else SMALLEST),
        columns=columns,
        rows=rows,
        layers=tuple(Layer(state=state, path=_path(ranks[state], columns)) for state in ranks),
    )


def _path(ranks: list[int], columns: int) -> str:
    """Return a line through each unbroken stretch of squares in a row."""
    parts = []
    start = end = -1
    for rank in [*ranks, -2]:
        if rank == end and rank % columns:
            end += 1
            continue
        if start >= 0:
            row, column = divmod(start, columns)
            parts.append(f"M{column * CELL} {row * CELL + CELL // 2}h{(end - start) * CELL}")
        start, end = rank, rank + 1
    return "".join(parts)
