"""A checkpoint with large tensors loads as others do: verified, and read again before damage counts."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from lab.patience import PATIENCE
from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.damage import DamageError
from muster.checkpoint.source import FolderSource
from muster.worker.saves import Checkpointer, CorruptCheckpointError
from muster.worker.saves.local import kept_source
from muster.worker.saves.local.kept_source import KeptSource
from muster.worker.saves.local.remote_file import RemotePlace
from muster.worker.saves.storage import large_tensor, reading
from muster.worker.saves.storage.folder_storage import FolderStorage
from muster.worker.saves.storage.reading import ItemReader, VerifyingReader, load_into, open_checkpoint
from tests.support.saves.child_processes import no_child_left
from tests.support.saves.damage import flip
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

    def noted(self: ItemReader, wanted: Any, data: memoryview, *others: Any) -> None:
        lengths.append(len(data))
        load(self, wanted, data, *others)

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


def no_file(path: Path) -> None:
    path.unlink()


def too_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flip, no_file, too_short])
def test_damage_in_a_large_tensor_makes_the_load_step_down(folder: Path, damage: Callable[[Path], None]):
    damage(data_of(folder, 2))
    state = empty()
    made = checkpointer(folder).resume(state)
    assert made is not None
    assert made.step == 1
    assert torch.equal(state["weight"], weight(1))


@pytest.fixture
def reader(folder: Path) -> VerifyingReader:
    """A reader of step 2. All of its files were there when it was opened."""
    made = FolderStorage(folder, "job").read(folder / "step-0000000002")
    return VerifyingReader(open_checkpoint(made, FolderSource(Path(made.path)), verify=True, sizes=False))


def load(reader: VerifyingReader, state: dict[str, Any]) -> None:
    """Raise the error of the only rank."""
    try:
        load_into(state, None, reader)
    except CheckpointException as error:
        raise error.failures[0][0] from error


def test_wrong_bytes_of_a_large_tensor_from_another_node_are_read_again_from_a_verified_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    made = FolderStorage(folder, "job").read(folder / "step-0000000002")
    data = data_of(folder, 2).read_bytes()
    wrong, right = RemotePlace(("http://wrong:1/f",), "token"), RemotePlace(("http://right:1/f",), "token")
    asked: list[bool] = []

    class FakeRemoteFile:
        def __init__(self, place: RemotePlace, *, verify: bool = False) -> None:
            self.place = place
            assert verify == (place == right)

        def read_into(self, offset: int, buffer: memoryview) -> int:
            sent = bytearray(data)
            sent[len(data) // 2] ^= self.place == wrong
            piece = sent[offset : offset + len(buffer)]
            buffer[: len(piece)] = piece
            return len(piece)

        def close(self) -> None: ...

    class FakeKeeper:
        def find(self, attempt: object, name: str, timeout: float, *, damaged: bool, pieces: bool) -> Any:
            if name != data_of(folder, 2).name:
                return Path(made.path) / name
            asked.append(damaged)
            return right if damaged else wrong

    monkeypatch.setattr(kept_source, "RemoteFile", FakeRemoteFile)
    keeper: Any = FakeKeeper()
    source = KeptSource(keeper, SaveAttempt(1, 0), Path(made.path), PATIENCE)
    state = empty()
    load(VerifyingReader(open_checkpoint(made, source, verify=True, sizes=False)), state)
    assert torch.equal(state["weight"], weight(2))
    assert asked == [False, True]


@pytest.mark.parametrize("damage", [no_file, too_short])
def test_file_that_is_cut_off_while_it_is_loaded_is_damaged(
    folder: Path, reader: VerifyingReader, damage: Callable[[Path], None]
):
    damage(data_of(folder, 2))
    with pytest.raises(DamageError, match=r"it is missing|are there"):
        load(reader, empty())


def test_damage_is_found_wherever_it_is_in_the_stored_tensor(
    folder: Path, reader: VerifyingReader, whole_loads: list[int]
):
    path = data_of(folder, 2)
    whole = path.read_bytes()
    for offset in range(0, len(whole) - 4 * PIECE, len(whole) // 40):
        flip(path, offset)
        with pytest.raises(DamageError, match="are not what was written"):
            load(reader, empty())
        path.write_bytes(whole)
    assert max(whole_loads, default=0) <= 4 * PIECE, "damage takes no more memory"


@pytest.mark.parametrize("dimension", [0, 1])
def test_part_of_a_large_tensor_is_loaded_as_a_reshard_wants_it(
    reader: VerifyingReader, dimension: int, whole_loads: list[int]
):
    target = torch.zeros(50, 100) if dimension == 0 else torch.zeros(ROWS, 24)

    class Part(DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            """Two halves of what the state wants, each of the same stored tensor."""
            plan = super().create_local_plan()
            (item,) = plan.items
            half = target.size(dimension) // 2
            items = []
            for number in range(2):
                at = [0, 0]
                at[dimension] = number * half
                lengths = list(target.size())
                lengths[dimension] = half
                first, sizes = torch.Size(at), torch.Size(lengths)
                items.append(replace(item, dest_offsets=first, storage_offsets=first, lengths=sizes))
            return replace(plan, items=items)

        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            return narrow_tensor_by_index(target, read_item.dest_offsets, read_item.lengths)

    load_into({"weight": torch.zeros(ROWS, 100)}, Part(), reader)
    assert torch.equal(target, weight(2).narrow(dimension, 0, target.size(dimension)))
    assert bool(whole_loads) == (dimension == 1)


def test_planner_that_copies_in_commit_is_asked_once_for_each_tensor(folder: Path, reader: VerifyingReader):
    calls: list[str] = []

    class Temporary(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            calls.append(f"resolve {read_item.dest_index.fqn}")
            return torch.empty_like(super().resolve_tensor(read_item))

        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            calls.append(f"commit {read_item.dest_index.fqn}")
            super().resolve_tensor(read_item).copy_(tensor)

    state = empty()
    load_into(state, Temporary(), reader)
    assert torch.equal(state["weight"], weight(2))
    assert sorted(calls) == ["commit small", "commit weight", "resolve small", "resolve weight"]


def test_damage_in_the_only_checkpoint_is_raised(folder: Path):
    flip(data_of(folder, 1))
    flip(data_of(folder, 2))
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
