import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.service.web.rankmap import CELL, RankMap, rank_map


def drawn(picture: RankMap) -> dict[str, list[int]]:
    """The ranks whose squares are drawn, by state."""
    found: dict[str, list[int]] = {}
    for layer in picture.layers:
        ranks = found[layer.state] = []
        for x, y, length in re.findall(r"M(\d+) (\d+)h(\d+)", layer.path):
            first = int(x) // CELL
            assert 0 <= first < picture.columns
            assert first + int(length) // CELL <= picture.columns
            row = int(y) // CELL
            assert row < picture.rows
            ranks += range(row * picture.columns + first, row * picture.columns + first + int(length) // CELL)
    return found


@given(st.dictionaries(st.integers(0, 5_000), st.sampled_from(["connected", "lost"]), max_size=300))
def test_every_rank_has_its_square(states: dict[int, str]):
    given = {state: {rank for rank in states if states[rank] == state} for state in ("connected", "lost")}
    assert drawn(rank_map(given)) == {state: sorted(ranks) for state, ranks in given.items()}


@pytest.mark.parametrize(
    ("ranks", "columns", "rows"), [(0, 0, 0), (1, 1, 1), (16, 16, 1), (33, 32, 2), (4096, 128, 32)]
)
def test_it_is_as_wide_as_it_needs_to_be(ranks: int, columns: int, rows: int):
    picture = rank_map({"connected": range(ranks)})
    assert (picture.columns, picture.rows) == (columns, rows)
    assert picture.width <= 1_100


def test_ranks_that_stand_alike_cost_next_to_nothing():
    (layer,) = rank_map({"connected": range(4_096)}).layers
    assert len(layer.path) < 600
