"""A checkpoint with large tensors loads as others do: verified, and read again before damage counts."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.worker.saves import Checkpointer, CorruptCheckpointError
from muster.worker.saves.storage import large_tensor, reading
from muster.worker.saves.storage.reading import ItemReader
from tests.support.saves.child_processes import no_child_left
from tests.support.saves.fake_group import FakeGroup

PIECE = 4096
ROWS = 200
"""Each has 100 elements, so the tensor has some 20 pieces."""


def weight(step: int) -> torch.Tensor:
    return torch.arange(ROWS * 100, dtype=torch.float32).reshape(ROWS, 100) + step


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_tensor, "PIECE", PIECE)
    monkeypatch.setattr(large_tensor, "DIRECTORY", 2 * PIECE)
    monkeypatch.setattr(reading, "LARGE", 4 * PIECE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the steps 1 and 2."""
    monkeypatch.setattr(Checkpointer, "_check_group", lambda _: None)
    with no_child_left():
        made = checkpointer(tmp_path)
        for step in (1, 2):
            made.save(step, {"weight": weight(step), "small": torch.ones(3), "step": step})
        assert made.finalize(blocking=True) == [1, 2]
        made.close()
    return tmp_path


def checkpointer(folder: Path, **options: Any) -> Checkpointer:
    return Checkpointer(folder, barrier=FakeGroup(1).member(0), timeout=30, **options)  # type: ignore[arg-type]


def empty() -> dict[str, Any]:
    return {"weight": torch.zeros(ROWS, 100), "small": torch.zeros(3), "step": 0}


def data_of(folder: Path, step: int) -> Path:
    (path,) = (folder / f"step-{step:010}").glob("*.distcp")
    return path


@pytest.fixture
def whole_loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the items that were loaded as a whole."""
    lengths: list[int] = []
    load = ItemReader._load

    def noted(self: ItemReader, wanted: Any, data: memoryview, planner: Any) -> None:
        lengths.append(len(data))
        load(self, wanted, data, planner)

    monkeypatch.setattr(ItemReader, "_load", noted)
    return lengths


@pytest.mark.parametrize("verify", ["load", "off"])
def test_large_tensor_is_loaded_without_a_buffer_of_its_size(
    folder: Path, whole_loads: list[int], verify: str
):
    state = empty()
    assert checkpointer(folder, verify=verify).resume(state)
    assert torch.equal(state["weight"], weight(2))
    assert torch.equal(state["small"], torch.ones(3))
    assert state["step"] == 2
    assert max(whole_loads) <= 4 * PIECE


def test_large_tensor_goes_into_a_state_that_is_not_contiguous(folder: Path, whole_loads: list[int]):
    state = empty()
    state["weight"] = torch.zeros(100, ROWS).t()
    assert checkpointer(folder).resume(state)
    assert torch.equal(state["weight"], weight(2))
    assert max(whole_loads) > 4 * PIECE


def wrong_bytes(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def no_file(path: Path) -> None:
    path.unlink()


def too_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [wrong_bytes, no_file, too_short])
def test_damage_in_a_large_tensor_makes_the_load_step_down(folder: Path, damage: Callable[[Path], None]):
    damage(data_of(folder, 2))
    state = empty()
    made = checkpointer(folder).resume(state)
    assert made is not None
    assert made.step == 1
    assert torch.equal(state["weight"], weight(1))


def test_damage_in_the_only_checkpoint_is_raised(folder: Path):
    wrong_bytes(data_of(folder, 1))
    wrong_bytes(data_of(folder, 2))
    with pytest.raises(CorruptCheckpointError, match="are not what was written"):
        checkpointer(folder).resume(empty())


def test_piece_that_was_read_wrongly_once_is_no_damage(folder: Path, monkeypatch: pytest.MonkeyPatch):
    read = ItemReader._read_ahead
    wrong: list[int] = []

    def once(self: ItemReader, one: Any, buffer: memoryview) -> None:
        read(self, one, buffer)
        if one.piece is not None and one.piece.offset == 3 * PIECE and not wrong:
            wrong.append(buffer[0])
            buffer[0] ^= 1

    monkeypatch.setattr(ItemReader, "_read_ahead", once)
    state = empty()
    made = checkpointer(folder).resume(state)
    assert wrong
    assert made is not None
    assert made.step == 2
    assert torch.equal(state["weight"], weight(2))


def test_file_that_ends_early_is_an_error_without_verification(folder: Path):
    too_short(data_of(folder, 2))
    with pytest.raises(RuntimeError, match="ends before offset"):
        checkpointer(folder, verify="off").resume(empty())
