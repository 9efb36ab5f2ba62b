"""A file is verified while it is copied: a copy that has its full size is a whole one."""

import random
from pathlib import Path

import pytest

from muster.checkpoint.damage import DamageError
from muster.keeper.persisting import reading
from muster.keeper.persisting.reading import verified_pieces
from tests.support.keeping.checkpoints import entry_of

CONTENT = random.Random(1).randbytes(1_000)
ENTRY = entry_of(CONTENT, 0, segment=300)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE", 128)


def test_whole_file_is_read_and_each_piece_waits_for_its_turn(tmp_path: Path):
    (tmp_path / "f").write_bytes(CONTENT)
    waits: list[int] = []
    assert b"".join(map(bytes, verified_pieces(tmp_path / "f", "f", ENTRY, waits.append))) == CONTENT
    assert sum(waits) == 1_000
    assert max(waits) <= 128


@pytest.mark.parametrize("place", [0, 299, 300, 650, 999])
def test_damaged_file_is_never_read_to_its_end(tmp_path: Path, place: int):
    damaged = bytearray(CONTENT)
    damaged[place] ^= 1
    (tmp_path / "f").write_bytes(damaged)
    got = bytearray()
    with pytest.raises(DamageError, match="f at offset"):
        for piece in verified_pieces(tmp_path / "f", "f", ENTRY, lambda _: None):
            got += piece
    assert len(got) < 1_000


def test_file_that_ends_too_early_is_damaged(tmp_path: Path):
    (tmp_path / "f").write_bytes(CONTENT[:-1])
    with pytest.raises(DamageError, match="it ends too early"):
        list(verified_pieces(tmp_path / "f", "f", ENTRY, lambda _: None))
